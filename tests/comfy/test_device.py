"""What is taken of a device, and in which format a model is computed there, is as ComfyUI has it."""

from __future__ import annotations

from dataclasses import replace

import comfy.model_management
import pytest
import torch

from graft.tests.support import dynamic_vram
from graft.tests.support.card import PRETENDED
from graft.tests.support.tiny_clips import clip_of, tiny
from graft.tests.support.two_steps import CONFIG, Samples
from graft.training.comfy.model import device, weights
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.unload import unload
from graft.training.config import MemoryConfig
from graft.training.loop import train
from graft.training.memory.plan import GIB, budget_of

from ..support.tiny_models import TINY

CUDA = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("name", "bf16", "fp16", "chosen"),
    [
        ("sdxl", True, True, BF16),
        ("qwen", True, True, BF16),
        ("sdxl", False, True, FP16),  # RTX 20
        ("sdxl", False, False, FP32),  # GTX 16
        ("flux", False, True, FP16),
        *((name, False, True, FP32) for name in ("qwen", "lumina2", "hidream")),  # NaN in fp16
    ],
)
def test_a_model_is_computed_in_the_format_that_it_and_the_card_can(monkeypatch, name, bf16, fp16, chosen):
    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda device: bf16)
    monkeypatch.setattr(comfy.model_management, "should_use_fp16", lambda device: fp16)
    denoiser = ComfyDenoiser(TINY[name]())
    denoiser.device = CUDA
    assert denoiser.dtypes[0] == chosen
    assert (FP16 in denoiser.dtypes) == (name in ("sdxl", "flux")) and {BF16, FP32} <= set(denoiser.dtypes)


def test_on_the_cpu_a_model_is_computed_in_float32():
    assert device.supported_dtypes(TINY["flux"]().model.model_config, torch.device("cpu"))[0] == FP32


def test_fp16_is_refused_for_a_model_that_is_nan_in_it():
    config = replace(CONFIG, memory=MemoryConfig(dtype="fp16"))
    with pytest.raises(ValueError, match="Qwen-Image cannot be computed in fp16.*set precision in"):
        train(ComfyDenoiser(TINY["qwen"]()), Samples(TINY["qwen"]), config, None, steps=1)


def test_what_is_free_is_asked_while_nothing_of_the_model_is_on_the_device(monkeypatch):
    """Text encoders, norms and tables of positions are charged by every plan."""
    denoiser = ComfyDenoiser(tiny("sdxl")(), clip_of("sdxl"))
    monkeypatch.setattr(weights, "hold_weights", None)
    monkeypatch.setattr(device.device_memory, "free_bytes", lambda device: 5 * GIB)
    monkeypatch.setattr(comfy.model_management, "extra_reserved_memory", lambda: 0)
    assert budget_of(denoiser, MemoryConfig()) == 5 * GIB


@pytest.mark.parametrize(("name", "free"), [("cuda", 4 * GIB), ("cpu", 5 * GIB)])
def test_comfyuis_reserve_is_left_free_on_a_card(monkeypatch, name, free):
    monkeypatch.setattr(device.device_memory, "free_bytes", lambda device: 5 * GIB)
    monkeypatch.setattr(comfy.model_management, "EXTRA_RESERVED_VRAM", 1.0 * GIB)
    assert device.free_bytes(torch.device(name)) == free


def test_what_nobody_knows_is_not_reserved_from(monkeypatch):
    monkeypatch.setattr(device.device_memory, "free_bytes", lambda device: None)
    assert device.free_bytes(CUDA) is None


def test_what_comfyui_casts_into_is_freed_before_a_run(monkeypatch):
    freed = []
    monkeypatch.setattr(comfy.model_management, "reset_cast_buffers", lambda: freed.append(1), raising=False)
    with ComfyDenoiser(TINY["sd3"]()).hold(torch.float32):
        assert freed == [1]


def test_a_model_is_trained_on_the_device_that_it_was_sent_to(monkeypatch):
    patcher = TINY["sd3"]()
    monkeypatch.setattr(patcher, "load_device", torch.device("cuda", 1))
    assert ComfyDenoiser(patcher).device == torch.device("cuda", 1)


def test_memory_is_not_filled_for_nothing_while_training():
    assert torch.utils.deterministic.fill_uninitialized_memory
    with ComfyDenoiser(TINY["sd3"]()).hold(torch.float32):
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.skipif(not PRETENDED, reason="on the CPU, host memory is no other")
@dynamic_vram.is_off("--highvram switches it off")
@pytest.mark.parametrize("name", ["sd3", "sdxl"])
def test_weights_that_highvram_leaves_on_the_device_wait_in_host_memory_while_training(name):
    there = comfy.model_management.get_torch_device()
    patcher, usual = TINY[name](), TINY[name]()
    with torch.inference_mode():
        patcher.model.to(there)
    patcher.offload_device = there
    before = {n: p.cpu().clone() for n, p in patcher.model.named_parameters()}
    assert {p.device for p in patcher.model.parameters()} == {there}
    unload(patcher)
    assert {p.device.type for p in patcher.model.parameters()} == {"cpu"}
    config = replace(CONFIG, memory=MemoryConfig(dtype="fp32", base="offload"))
    states = [train(ComfyDenoiser(p), Samples(TINY[name]), config, None, steps=2) for p in (patcher, usual)]
    assert states[0].losses == states[1].losses
    assert all(torch.equal(p, before[n]) for n, p in patcher.model.named_parameters())
    comfy.model_management.load_models_gpu([patcher])
    assert {p.device for p in patcher.model.parameters()} == {there}
