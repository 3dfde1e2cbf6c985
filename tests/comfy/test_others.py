"""Architectures without a row of their own: the generic row trains them, whatever their latents are."""

import pytest
import torch

from graft.tests.comfy.test_families import two_steps, unmoved
from graft.tests.comfy.tiny_others import OTHERS
from graft.training.adapters import matches
from graft.training.comfy.denoiser import ComfyDenoiser


def built(name):
    if OTHERS[name].missing:
        pytest.skip(f"this ComfyUI has no {OTHERS[name].config}")
    return ComfyDenoiser(OTHERS[name]())


@pytest.mark.parametrize("name", OTHERS)
def test_it_trains_whole_and_alike_with_checkpointing_and_without(name):
    """By step two every adapter has moved but those on layers that the network does not use here."""
    denoiser, tiny = built(name), OTHERS[name]
    assert denoiser.family.name == "generic"
    state, again = (two_steps(denoiser, tiny, mode) for mode in ("none", "block"))
    silent = {key.rpartition(".")[0] for key in unmoved(denoiser, state)}
    assert not {path for path in silent if not matches(path, tiny.idle)}
    assert all(torch.isfinite(tensor).all() for tensor in state.weights.values())
    assert state.losses == again.losses
    assert all(torch.equal(again.weights[key], tensor) for key, tensor in state.weights.items())
