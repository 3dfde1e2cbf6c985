"""Architectures without a row of their own: the generic row trains them, whatever their latents are."""

import pytest
import torch

from graft.tests.card import PRETENDED
from graft.tests.comfy.test_families import two_steps, unmoved
from graft.tests.comfy.tiny_others import OTHERS
from graft.training.adapters import matches
from graft.training.comfy.denoiser import ComfyDenoiser


IN_PLACE = ("ltxav", "ltxv", "pixeldit")
"""They change in place what autograd kept: their first step fails and is computed again with copies."""


def built(name):
    if OTHERS[name].missing:
        pytest.skip(f"this ComfyUI has no {OTHERS[name].config}")
    if PRETENDED and name in IN_PLACE:
        pytest.skip("an error in a backward pass on the pretended card ends the process, in torch")
    return ComfyDenoiser(OTHERS[name]())


@pytest.mark.parametrize("name", OTHERS)
def test_it_trains_whole_and_alike_with_checkpointing_and_without(name, caplog):
    """By step two every adapter has moved but those on layers that the network does not use here."""
    caplog.set_level("INFO")
    denoiser, tiny = built(name), OTHERS[name]
    assert denoiser.family.name == "generic"
    state, again = (two_steps(denoiser, tiny, mode) for mode in ("none", "block"))
    assert ("copies are kept" in caplog.text) == (name in IN_PLACE)
    silent = {key.rpartition(".")[0] for key in unmoved(denoiser, state)}
    assert not {path for path in silent if not matches(path, tiny.idle)}
    assert all(torch.isfinite(tensor).all() for tensor in state.weights.values())
    assert state.losses == again.losses
    assert all(torch.equal(again.weights[key], tensor) for key, tensor in state.weights.items())
