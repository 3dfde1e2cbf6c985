"""The laws on ComfyUI's own SD3 class: what is trained is what the stock loader renders, and the base is
left alone.
"""

from __future__ import annotations

import dataclasses
import logging

import comfy.lora
import comfy.model_management
import comfy.ops
import comfy.sd
import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch
from torch.nn.attention import SDPBackend

from graft.tests.support.tiny_sd3 import Noise, sd3_state_dict
from graft.tests.support.two_steps import Samples
from graft.training.adapters.build import attach, restore_adapters
from graft.training.comfy.files.trained_lora import with_lora
from graft.training.comfy.model import weights
from graft.training.comfy.model.denoiser import ComfyDenoiser, join_conditions
from graft.training.config import AdapterConfig, MemoryConfig, OptimizerConfig, TrainConfig
from graft.training.frozen_base.replace_forward import replaced
from graft.training.loop import initial_state, train
from graft.training.memory import compiling
from graft.training.run.saved_state import load_state, save_state

from ..support.tiny_models import TINY

CONFIG = TrainConfig(
    batch_size=2,
    adapter=AdapterConfig(rank=4, alpha=2.0),
    optimizer=OptimizerConfig(lr=3e-3),
    memory=MemoryConfig(dtype="fp32"),
)


@pytest.fixture
def patcher():
    """Loaded as a node would load it: in inference mode."""
    with torch.inference_mode():
        return comfy.sd.load_diffusion_model_state_dict(sd3_state_dict())


def run(patcher, state=None, steps=3, config=CONFIG):
    return train(ComfyDenoiser(patcher), Noise(), config, state, steps=steps)


def predict(patcher, state=None):
    denoiser, batch = ComfyDenoiser(patcher), Noise().batch(2, seed=0, index=0)
    x, sigma = noisy(denoiser, batch)
    with torch.no_grad(), denoiser.hold(torch.float32) as base:
        adapters = restore_adapters(denoiser.specs, state.adapter, state.weights, x.device) if state else {}
        with attach(base.layers, adapters):
            return denoiser.denoise(x, sigma, batch)


def sampled(patcher):
    """What ComfyUI's own sampling path computes: loaded by its memory management, called in inference
    mode.
    """
    with torch.inference_mode():
        comfy.model_management.load_models_gpu([patcher], force_full_load=True)
        denoiser, batch = ComfyDenoiser(patcher), Noise().batch(2, seed=0, index=0)
        x, sigma = noisy(denoiser, batch)
        return patcher.model.apply_model(x, sigma, **join_conditions(denoiser.conditions(x, batch)))


def noisy(denoiser, batch):
    return batch.latents.to(denoiser.device), torch.full((2,), 0.7, device=denoiser.device)


def assert_same(a, b):
    assert a.losses == b.losses
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


@pytest.mark.feature(113)
def test_the_held_model_computes_what_comfyui_samples(patcher):
    assert torch.allclose(predict(patcher), sampled(patcher), atol=1e-5)


@pytest.mark.feature(96)
def test_two_parts_equal_the_whole_and_disk_changes_nothing(patcher, tmp_path):
    save_state(run(patcher, steps=2), tmp_path / "state")
    assert_same(run(patcher, load_state(tmp_path / "state"), steps=3), run(patcher, steps=5))


def test_a_fresh_lora_changes_nothing_and_every_parameter_moves_by_step_two(patcher):
    start, state = initial_state(ComfyDenoiser(patcher), CONFIG), run(patcher, steps=2)
    assert torch.equal(predict(patcher), predict(patcher, start))
    assert not [name for name in state.weights if torch.equal(start.weights[name], state.weights[name])]


def test_the_stock_loader_renders_what_was_trained(patcher, caplog):
    state = run(patcher, steps=10)
    denoiser = ComfyDenoiser(patcher)
    with caplog.at_level(logging.WARNING):
        patched, _ = with_lora(patcher, None, state, denoiser.family)
        stock = sampled(patched)
    base, attached = predict(patcher), predict(patcher, state)
    error = ((stock - base) - (attached - base)).norm() / (attached - base).norm()
    assert error <= 1e-4 and "not loaded" not in caplog.text.lower()


@pytest.mark.parametrize("cancel", [Exception, BaseException])
def test_the_base_is_as_before_after_training_and_after_a_cancel(patcher, cancel):
    model = patcher.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: (set(vars(m)), m.training) for name, m in model.named_modules()}

    def interrupt(progress, handles):
        raise cancel("cancelled")

    run(patcher, steps=1)
    with pytest.raises(cancel, match="cancelled"):
        train(ComfyDenoiser(patcher), Noise(), CONFIG, None, steps=2, on_step=interrupt)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert attributes == {name: (set(vars(m)), m.training) for name, m in model.named_modules()}


def test_cancel_is_answered_between_compiled_blocks(patcher, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    config = dataclasses.replace(CONFIG, memory=MemoryConfig(dtype="fp32", compile=True))
    computed = []

    def press(block, *_):
        computed.append(block)
        comfy.model_management.interrupt_current_processing()

    blocks = patcher.model.diffusion_model.joint_blocks
    hooks = [block.register_forward_hook(press) for block in blocks]
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        run(patcher, config=config)
    assert computed == [blocks[0]]
    for hook in hooks:
        hook.remove()
    assert run(patcher, config=config).step == 3


def test_a_lora_on_the_incoming_model_applies_and_is_not_saved(patcher):
    first = run(patcher, steps=10)
    patched, _ = with_lora(patcher, None, first, ComfyDenoiser(patcher).family)
    assert torch.allclose(predict(patched), predict(patcher, first), atol=1e-4)
    assert ComfyDenoiser(patched).fingerprint != ComfyDenoiser(patcher).fingerprint


def test_an_attention_without_backward_is_never_used(patcher, monkeypatch):
    def sage(q, k, v, heads, **kwargs):
        return attention_pytorch(q, k, v, heads, **kwargs).detach()

    patcher.model_options["transformer_options"]["optimized_attention_override"] = lambda f, *a, **k: sage(
        *a, **k
    )
    start, state = initial_state(ComfyDenoiser(patcher), CONFIG), run(patcher, steps=2)
    assert not [name for name in state.weights if torch.equal(start.weights[name], state.weights[name])]


def test_a_patch_is_told_what_it_is_told_in_sampling():
    told, patcher = [], TINY["sdxl"]()

    def look(x, options):
        told.append(f"{len(options['sigmas'])} {options['cond_or_uncond']} {len(options['uuids'])}")
        return x

    patcher.set_model_attn2_output_patch(look)
    train(ComfyDenoiser(patcher), Samples(TINY["sdxl"]), CONFIG, None, steps=1)
    assert set(told) == {"2 [0] 1"}


@pytest.mark.parametrize("carries", ["injections", "forced_hooks"])
def test_what_comfyui_changes_only_while_it_runs_a_model_is_refused(patcher, carries):
    bypassed = patcher.clone()
    setattr(bypassed, carries, {"bypass_lora": []})
    with pytest.raises(ValueError, match="the MODEL carries .* Connect the MODEL from before that node"):
        ComfyDenoiser(bypassed)


def test_a_network_that_a_node_has_compiled_is_trained_under_its_own_names(patcher):
    compiled = patcher.clone()
    network = torch.compile(patcher.model.diffusion_model, backend="eager")
    compiled.add_object_patch("diffusion_model", network)
    assert ComfyDenoiser(compiled).specs.keys() == ComfyDenoiser(patcher).specs.keys()
    assert run(compiled, steps=2).losses == run(patcher, steps=2).losses


def test_what_fast_rounds_in_sampling_is_exact_while_training(patcher):
    matmul = torch.backends.cuda.matmul
    with replaced(matmul, "allow_fp16_accumulation", True):
        with ComfyDenoiser(patcher).hold(torch.float32):
            assert not matmul.allow_fp16_accumulation
        assert matmul.allow_fp16_accumulation


def test_comfyuis_deterministic_is_strict_while_training_and_nothing_changes_without(patcher):
    def mode():
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled(), warns

    before = mode()
    try:
        torch.use_deterministic_algorithms(False)
        with ComfyDenoiser(patcher).hold(torch.float32):
            assert mode() == (False, False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with ComfyDenoiser(patcher).hold(torch.float32):
            assert mode() == (True, False)
        assert mode() == (True, True)
        run(patcher, steps=2)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_cudnns_attention_is_left_out_while_the_base_is_held(patcher, monkeypatch):
    preferred = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    monkeypatch.setattr(comfy.ops, "SDPA_BACKEND_PRIORITY", preferred, raising=False)
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    with ComfyDenoiser(patcher).hold(torch.float32):
        assert preferred == [SDPBackend.EFFICIENT_ATTENTION] and not torch.backends.cuda.cudnn_sdp_enabled()
    assert preferred == [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    assert torch.backends.cuda.cudnn_sdp_enabled() == enabled


def test_a_layer_that_is_no_nn_linear_is_trained(patcher):
    class Quantized(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.weight, self.bias = linear.weight, linear.bias
            self.in_features, self.out_features = linear.in_features, linear.out_features

    block = patcher.model.diffusion_model.joint_blocks[0].x_block
    block.attn.qkv = Quantized(block.attn.qkv)
    assert "joint_blocks.0.x_block.attn.qkv" in ComfyDenoiser(patcher).specs
    run(patcher, steps=2)


def test_fp8_weights_with_a_scale_are_dequantized_in_both_passes():
    linear = torch.nn.Linear(8, 8, bias=False)
    plain = linear.weight.detach().clone()
    linear.weight = torch.nn.Parameter((plain * 16).to(torch.float8_e4m3fn), requires_grad=False)
    linear.scale_weight = torch.nn.Parameter(torch.tensor(1 / 16), requires_grad=False)
    found = weights._stored(linear.weight, linear.weight, linear).dequantize(torch.float32)
    assert torch.allclose(found, plain, rtol=0.07, atol=1e-3)
