"""What a step takes is known before it is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from graft.tests.support.adapter_cases import adapter_config, train_config
from graft.tests.support.memory import measured
from graft.tests.support.tiny import TinyDataset, TinyDenoiser
from graft.training.config import ObjectiveConfig
from graft.training.memory.estimate import estimate_step, restore_attributes
from graft.training.memory.tensor_counter import LiveTensors
from graft.training.objective.parts import with_largest_parts

BATCH = TinyDataset().batch(2, seed=0, index=0)


@pytest.mark.parametrize("mode", ["none", "selective", "block"])
@pytest.mark.parametrize("method", ["lora", "dora", "lokr", "oft", "boft", "glora", "full"])
def test_an_estimate_is_what_the_step_takes(method, mode):
    denoiser, config = TinyDenoiser(), train_config(adapter_config(method, targets="all"))
    estimate = estimate_step(denoiser, denoiser.specs, config.adapter, BATCH, mode, torch.float32)
    live, saved = measured(denoiser, BATCH, config, mode)
    assert abs(estimate.saved / saved - 1) <= 0.1 and abs(estimate.peak / live.peak - 1) <= 0.1


@pytest.mark.parametrize("kind", ["dropout", "rank_dropout"])
@pytest.mark.parametrize("mode", ["none", "selective", "block"])
def test_dropout_is_estimated(kind, mode):
    denoiser, config = TinyDenoiser(), train_config(adapter_config("lora", targets="all", **{kind: 0.1}))
    estimate = estimate_step(denoiser, denoiser.specs, config.adapter, BATCH, mode, torch.float32)
    live, saved = measured(denoiser, BATCH, config, mode)
    assert abs(estimate.saved / saved - 1) <= 0.1 and abs(estimate.peak / live.peak - 1) <= 0.1


@pytest.mark.parametrize("mode", ["none", "selective", "block"])
def test_preservation_is_estimated(mode):
    denoiser, config = TinyDenoiser(), train_config(adapter_config("lora", targets="all"))
    goal = ObjectiveConfig(preservation=1.0)
    batch = with_largest_parts(BATCH, goal)
    options = (denoiser, denoiser.specs, config.adapter)
    estimate = estimate_step(*options, batch, mode, torch.float32)
    live, saved = measured(denoiser, batch, replace(config), mode)
    assert abs(estimate.saved / saved - 1) <= 0.1 and abs(estimate.peak / live.peak - 1) <= 0.1
    alone = estimate_step(*options, BATCH, mode, torch.float32)
    assert alone.peak < estimate.peak < 1.5 * alone.peak and estimate.flops >= 2 * alone.flops


def test_an_estimate_leaves_base_and_adapters_alone():
    denoiser, config = TinyDenoiser(), train_config(adapter_config("lora", targets="all"))
    before = {name: tensor.clone() for name, tensor in denoiser.module.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in denoiser.module.named_modules()}
    estimate_step(denoiser, denoiser.specs, config.adapter, BATCH, "block", torch.float32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in denoiser.module.state_dict().items())
    assert {name: dict(vars(module)) for name, module in denoiser.module.named_modules()} == attributes


def test_tables_that_a_network_computes_once_are_not_left_fake():
    network = nn.Linear(2, 2)
    with restore_attributes(network):
        network.table = "computed meanwhile"
    assert not hasattr(network, "table")


def test_live_tensors_are_counted_until_nothing_refers_to_them():
    outside = torch.zeros(100)
    with LiveTensors() as live:
        a = outside + 1
        view = a[:50]
        assert live.now == 400
        del a
        assert live.now == 400
        b = view * 2
        del view
    assert (live.now, live.peak) == (b.nbytes, 600) and outside.sum() == 0


def test_products_are_counted():
    with LiveTensors() as live:
        torch.zeros(3, 4) @ torch.zeros(4, 5)
    assert live.flops == 2 * 3 * 4 * 5


def test_attention_counts_on_the_cpu_too():
    q, k, v = (torch.randn(2, 3, length, 16, requires_grad=True) for length in (5, 7, 7))
    with LiveTensors() as live:
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        forward = live.flops
        made.sum().backward()
    assert forward == 2 * 3 * 2 * (2 * 5 * 7 * 16) and live.flops > 3 * forward


def test_a_limit_is_kept():
    with (
        pytest.raises(torch.OutOfMemoryError, match="400 bytes are in use, 300"),
        LiveTensors(300),
    ):
        torch.zeros(100)
