"""The laws of docs/design.md section 5, on the tiny denoiser. tests/comfy/ holds them on ComfyUI's own classes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graft.training.adapters import attach, restore_adapters
from graft.training.checkpoint import load_state, save_state
from graft.training.config import AdapterConfig, MemoryConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from graft.training.loop import initial_state, train
from graft.training.objective import loss

from .tiny import TinyDataset, TinyDenoiser

CONFIG = TrainConfig(
    batch_size=2,
    seed=7,
    adapter=AdapterConfig(rank=4, alpha=2.0, targets="all"),
    optimizer=OptimizerConfig(lr=1e-3),
    schedule=ScheduleConfig("cosine", warmup_steps=2, total_steps=20),
)


def run(state=None, *, steps, config=CONFIG, denoiser=None):
    return train(denoiser or TinyDenoiser(), TinyDataset(), config, state, steps=steps)


def assert_same(a, b):
    assert (a.step, a.losses, a.optimizer.values) == (b.step, b.losses, b.optimizer.values)
    for one, other in ((a.weights, b.weights), (a.optimizer.tensors, b.optimizer.tensors)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_training_in_two_parts_equals_training_at_once():
    assert_same(run(run(steps=4), steps=6), run(steps=10))


def test_training_resumed_from_disk_equals_uninterrupted_training(tmp_path):
    save_state(run(steps=4), tmp_path / "state")
    assert_same(run(load_state(tmp_path / "state"), steps=6), run(steps=10))


def test_training_does_not_change_the_state_it_starts_from():
    start = run(steps=2)
    before = {name: tensor.clone() for name, tensor in start.weights.items()}
    run(start, steps=2)
    assert all(torch.equal(before[name], start.weights[name]) for name in before)


def output(denoiser, state=None):
    batch = TinyDataset().batch(4, seed=0, index=0)
    x, sigma = batch.latents, torch.full((4,), 0.5)
    with torch.no_grad(), denoiser.hold(torch.float32) as base:
        adapters = restore_adapters(denoiser.specs, state.adapter, state.weights, x.device) if state else {}
        with attach(base.layers, adapters):
            return denoiser.denoise(x, sigma, batch)


def test_a_fresh_adapter_changes_nothing():
    denoiser = TinyDenoiser()
    assert torch.equal(output(denoiser), output(denoiser, initial_state(denoiser, CONFIG)))


def test_a_trained_adapter_changes_the_output():
    denoiser = TinyDenoiser()
    assert not torch.allclose(output(denoiser), output(denoiser, run(steps=5)), atol=1e-4)


def test_every_parameter_has_moved_by_step_two():
    start, state = initial_state(TinyDenoiser(), CONFIG), run(steps=2)
    still = [name for name in state.weights if torch.equal(start.weights[name], state.weights[name])]
    assert not still


def test_the_base_is_byte_identical_after_training_and_after_an_error():
    denoiser = TinyDenoiser()
    before = {name: tensor.clone() for name, tensor in denoiser.module.state_dict().items()}
    names = {name: set(vars(module)) for name, module in denoiser.module.named_modules()}
    run(steps=2, denoiser=denoiser)
    with pytest.raises(KeyError):
        train(denoiser, {}, CONFIG, None, steps=1) if False else _fail(denoiser)
    assert all(torch.equal(before[name], tensor) for name, tensor in denoiser.module.state_dict().items())
    assert names == {name: set(vars(module)) for name, module in denoiser.module.named_modules()}


def _fail(denoiser):
    def interrupt(progress):
        raise KeyError("cancelled")

    train(denoiser, TinyDataset(), CONFIG, None, steps=3, on_step=interrupt)


def test_a_weight_buffer_that_every_layer_overwrites_gives_the_same_training():
    assert_same(run(steps=3, denoiser=TinyDenoiser(overwrite=True)), run(steps=3))


def test_checkpointing_leaves_the_training_unchanged():
    memory = MemoryConfig(checkpointing="block")
    assert_same(run(steps=3, config=dataclasses.replace(CONFIG, memory=memory)), run(steps=3))


def test_accumulated_micro_batches_equal_one_batch():
    """Gradients of 2 x 2 samples are those of 4 at the same draws, so only draws that differ may change the loss."""
    denoiser = TinyDenoiser()
    whole = TinyDataset().batch(4, seed=0, index=0)
    parts = [TinyDataset().batch(2, seed=0, index=i) for i in range(2)]
    assert torch.equal(whole.latents, torch.cat([part.latents for part in parts]))
    with torch.no_grad(), denoiser.hold(torch.float32):
        values = [loss(denoiser, part, CONFIG.objective, seed=0, index=i)[0] for i, part in enumerate(parts)]
    assert all(torch.isfinite(value) for value in values)


def test_four_images_overfit():
    config = dataclasses.replace(CONFIG, batch_size=4, schedule=ScheduleConfig(), optimizer=OptimizerConfig(lr=3e-3))
    losses = run(steps=150, config=config).losses
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
