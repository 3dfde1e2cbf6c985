"""Under ComfyUI's dynamic VRAM a training is what it is without."""

from __future__ import annotations

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import pytest
import torch
from safetensors.torch import load_file

from graft.tests.support import dynamic_vram
from graft.tests.support.small_base import STARTER
from graft.tests.support.starter_base import with_difference
from graft.tests.support.two_steps import CONFIG, Samples
from graft.training.comfy.model import loading
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.fingerprint import fingerprint
from graft.training.loop import train

from ..support.tiny_models import TINY
from ..support.tiny_others import OTHERS

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


def test_a_run_begun_with_dynamic_vram_is_the_same_run_without(base):
    """As in `graft worker`, and after --disable-dynamic-vram: a file in fp16 whose model computes in bf16."""
    tensors = load_file(STARTER)
    (base / "models" / "checkpoints" / "half.safetensors").write_bytes(STARTER.read_bytes())
    parts = {k.removeprefix("first_stage_model."): v for k, v in tensors.items() if "first_stage" in k}
    assert torch.float16 in {tensor.dtype for tensor in parts.values()}

    def fingerprints():
        vae = comfy.sd.VAE(sd=dict(parts), dtype=torch.bfloat16)
        patcher = loading.load_base("half.safetensors", [], loading.FROM_CHECKPOINT, "bf16")[0]
        kept = {w.dtype for w in (*vae.first_stage_model.parameters(), *patcher.model.parameters())}
        return fingerprint(vae.first_stage_model), ComfyDenoiser(patcher).fingerprint, kept

    *on, kept = fingerprints()
    with dynamic_vram.off(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
        *off, rounded = fingerprints()
    assert on == off and torch.float16 in kept and torch.float16 not in rounded
