"""Architectures without a row of their own: the generic row trains them, whatever their latents are."""

from dataclasses import replace

import pytest
import torch

from graft.tests.support.card import PRETENDED
from graft.tests.support.tiny_others import OTHERS
from graft.tests.support.two_steps import two_steps, unmoved
from graft.training.adapters.build import matches
from graft.training.comfy import versions
from graft.training.comfy.model.denoiser import ComfyDenoiser

IN_PLACE = ("ltxav", "ltxv", "pixeldit")
"""They change in place what autograd kept: their first step fails and is computed again with copies."""


def built(name):
    if OTHERS[name].missing:
        pytest.skip(f"this ComfyUI has no {OTHERS[name].config}")
    if PRETENDED and name in IN_PLACE:
        pytest.skip("an error in a backward pass on the pretended card ends the process, in torch")
    return ComfyDenoiser(OTHERS[name]())


@pytest.mark.feature(5, 7)
@pytest.mark.parametrize("name", OTHERS)
def test_it_trains_whole_and_alike_with_checkpointing_and_without(name, caplog):
    """By step two every adapter has moved but those on layers that the network does not use here."""
    caplog.set_level("INFO")
    denoiser, tiny = built(name), OTHERS[name]
    assert denoiser.family.name == tiny.config
    state, again = (two_steps(denoiser, tiny, mode) for mode in ("none", "block"))
    assert ("going on with copies" in caplog.text) == (name in IN_PLACE)
    silent = {key.rpartition(".")[0] for key in unmoved(denoiser, state)}
    assert not {path for path in silent if not matches(path, tiny.idle)}
    assert all(torch.isfinite(tensor).all() for tensor in state.weights.values())
    assert state.losses == again.losses
    assert all(torch.equal(again.weights[key], tensor) for key, tensor in state.weights.items())


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "cascade"])
def test_sides_of_images_are_multiples_of_what_the_vae_takes(name):
    denoiser = built(name)
    assert denoiser.family.bucket_step % denoiser.pixels_per_cell == 0


@pytest.mark.parametrize("name", ["wan", "hydit", "stable_audio"])
def test_latents_of_another_kind_of_vae_are_refused_by_name(name):
    tiny = OTHERS[name]
    other = replace(tiny, frames=0 if tiny.frames else 2)
    with pytest.raises(
        ValueError, match=rf"{tiny.config} takes latents of \(batch, channels, .*\), but these"
    ):
        two_steps(built(name), other)


@pytest.mark.skipif(PRETENDED, reason="an error in a backward pass there ends the process, in torch")
def test_a_network_of_operators_without_a_backward_pass_is_refused_by_name(monkeypatch):
    """As they are called where ComfyUI is newer than what is known here of its kernels."""
    if not versions.plain_kernels():
        pytest.skip("this ComfyUI has no kernels of its own")
    monkeypatch.setattr(versions, "plain_kernels", dict)
    with pytest.raises(ValueError, match=r"ErnieImage cannot be trained: .*apply_rope_split_half.* Update"):
        two_steps(built("ernie"), OTHERS["ernie"])
