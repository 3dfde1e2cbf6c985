"""Under ComfyUI's dynamic VRAM a training is what it is without."""

from __future__ import annotations

import comfy.model_management
import comfy.model_patcher
import pytest
import torch

from graft.training.comfy.denoiser import ComfyDenoiser
from graft.training.loop import train

from .test_families import CONFIG, Samples
from .test_fingerprint import with_difference
from .tiny_models import TINY
from .tiny_others import OTHERS

MODELS = {**TINY, **{name: OTHERS[name] for name in ("anima", "cosmos_predict2", "ernie", "joyimage")}}
"""Every family, and those that hand their norms' weights to functions that training replaces."""


@pytest.mark.parametrize("name", MODELS)
def test_a_training_is_bit_equal_with_dynamic_vram_and_without(name):
    tiny = MODELS[name]
    on, off = tiny(), tiny(patcher=comfy.model_patcher.ModelPatcher)
    assert on.is_dynamic() and not off.is_dynamic()
    comfy.model_management.load_models_gpu([with_difference(on)])
    with_it, without = (
        train(ComfyDenoiser(patcher), Samples(tiny), CONFIG, None, steps=3) for patcher in (on, off)
    )
    assert with_it.losses == without.losses and with_it.base == without.base
    assert all(torch.equal(with_it.weights[key], weight) for key, weight in without.weights.items())
