"""The fused low-rank layer equals the plain path, and keeps nothing that it can fetch or compute again."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from graft.tests.support.adapter_cases import trained_case
from graft.tests.support.memory import saved_bytes
from graft.training.adapters.base import Adapter
from graft.training.adapters.build import attach, draws
from graft.training.adapters.fused import can_fuse

FUSED = ("linear", "conv1d", "conv2d", "conv2d-1x1")


def gradients(forward, adapter, x):
    """Return the output, and the gradients of x and of the parameters, by names."""
    x = x.detach().requires_grad_()
    for parameter in adapter.parameters():
        parameter.grad = None
    y = forward(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in adapter.named_parameters()}}


def assert_near(one, other, tolerance):
    for name in one:
        error = (one[name] - other[name]).float().norm() / other[name].float().norm()
        assert error <= tolerance, f"{name}: {error}"


def plain(layer, adapter):
    return lambda x: Adapter.forward(adapter, layer, x)


def fused(layer, adapter):
    assert can_fuse(layer)
    return lambda x: adapter(layer, x)


@pytest.mark.feature(109)
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("alpha", [2.0, 4.0])
def test_the_fused_layer_equals_the_plain_path_in_float32(kind, alpha):
    layer, adapter, x = trained_case("lora", kind, alpha=alpha)
    exact = gradients(plain(layer, adapter), adapter, x)
    assert_near(gradients(fused(layer, adapter), adapter, x), exact, 1e-6)


@pytest.mark.parametrize("kind", FUSED)
def test_the_fused_layer_equals_the_plain_path_in_bf16_within_rounding(kind):
    layer, adapter, x = trained_case("lora", kind)
    exact = gradients(plain(layer, adapter), adapter, x)
    assert_near(gradients(fused(layer, adapter), adapter, x.bfloat16()), exact, 0.02)


@pytest.mark.parametrize("kind", FUSED)
def test_the_fused_layer_under_checkpointing_is_bit_equal(kind):
    layer, adapter, x = trained_case("lora", kind)
    forward = fused(layer, adapter)
    again = gradients(lambda x: checkpoint(forward, x, use_reentrant=False), adapter, x)
    assert all(torch.equal(again[name], value) for name, value in gradients(forward, adapter, x).items())


def test_three_layers_that_read_one_tensor_save_it_once_and_nothing_else():
    cases = [trained_case("lora", "linear") for _ in range(3)]
    x = cases[0][2].bfloat16().requires_grad_() * 1
    saved, _ = saved_bytes(lambda: [adapter(layer, x) for layer, adapter, _ in cases])
    masters = sum(p.numel() * p.element_size() for _, adapter, _ in cases for p in adapter.parameters())
    assert saved == x.numel() * x.element_size() + masters


@pytest.mark.parametrize("share", ["dropout", "rank_dropout", "module_dropout"])
def test_dropout_goes_by_the_plain_path(share, monkeypatch):
    layer, adapter, x = trained_case("lora", "linear", **{share: 0.5})
    monkeypatch.setattr("graft.training.adapters.fused.low_rank", None)
    with draws(0, 0):
        assert adapter(layer, x).shape == layer.forward(x).shape


def test_an_input_without_gradient_trains_the_factors():
    layer, adapter, x = trained_case("lora", "linear")
    adapter(layer, x).sum().backward()
    assert all(p.grad is not None for p in adapter.parameters())


def test_attached_adapters_compute_fused():
    layer, adapter, x = trained_case("lora", "linear")
    with attach({layer.name: layer}, {layer.name: adapter}):
        assert "LowRank" in type(layer.module(x).grad_fn).__name__
