"""The laws of docs/design.md section 5 on the tiny denoiser. tests/comfy/ holds them on ComfyUI's classes."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from graft.tests.support.runs import CONFIG, assert_same, run
from graft.training.adapters.build import attach, restore_adapters
from graft.training.config import AdapterConfig, MemoryConfig, OptimizerConfig, ScheduleConfig
from graft.training.live_state import LiveState
from graft.training.loop import clip_gradients, compute_gradients, initial_state, train
from graft.training.model import Batch
from graft.training.objective.loss import draw_loss, loss_at
from graft.training.run.saved_state import load_state, save_state
from graft.training.validation import validation_loss

from .support.tiny import Flow, TinyDataset, TinyDenoiser, TinySamples


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


def test_a_state_of_another_lora_is_refused_with_what_differs():
    other = dataclasses.replace(CONFIG, adapter=AdapterConfig(rank=8, alpha=2.0, targets="all"))
    with pytest.raises(ValueError, match="step 1 holds a LoRA with rank 4, but the settings ask for rank 8;"):
        run(run(steps=1), steps=1, config=other)


def test_a_state_of_another_base_is_refused():
    other = TinyDenoiser()
    other.fingerprint = "other"
    with pytest.raises(ValueError, match="belongs to another base model .its fingerprint is tiny.* is other"):
        run(run(steps=1), steps=1, denoiser=other)


def test_a_model_that_ignores_the_noise_is_neither_trained_nor_measured():
    class Ignoring(Flow):
        def noise_scaling(self, sigma, noise, latent_image):
            return latent_image

    denoiser = TinyDenoiser()
    denoiser.sampling = Ignoring()
    for attempt in (
        partial(run, steps=1, denoiser=denoiser),
        partial(validation_loss, denoiser, TinySamples()),
    ):
        with pytest.raises(ValueError, match="tiny cannot be trained: its Ignoring ignores the noise"):
            attempt()


def test_the_losses_of_a_run_are_those_of_its_micro_batches_one_after_another():
    still = OptimizerConfig(lr=1e-12)
    state = run(steps=2, config=dataclasses.replace(CONFIG, gradient_accumulation=3, optimizer=still))
    denoiser, losses = TinyDenoiser(), []
    with torch.no_grad(), denoiser.hold(torch.float32):
        for index in range(6):
            batch = TinyDataset().batch(2, seed=7, index=index)
            losses.append(draw_loss(denoiser, batch, CONFIG.objective, seed=7, index=index)[0].item())
    assert state.losses == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3], rel=1e-5)


def test_a_step_is_taken_at_the_rate_of_the_schedule():
    start, sgd = initial_state(TinyDenoiser(), CONFIG), OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.0)
    moved = []
    for schedule in (ScheduleConfig(), ScheduleConfig(warmup_steps=2)):
        state = run(steps=1, config=dataclasses.replace(CONFIG, optimizer=sgd, schedule=schedule))
        moved.append({name: state.weights[name] - start.weights[name] for name in start.weights})
    assert any(step.any() for step in moved[0].values())
    assert all(torch.allclose(moved[0][n], 2 * moved[1][n], rtol=1e-3, atol=1e-7) for n in start.weights)


def test_no_difference_outgrows_the_norm_that_was_set():
    adapter = dataclasses.replace(CONFIG.adapter, max_norm=0.01)
    denoiser, norms = TinyDenoiser(), []
    for config in (CONFIG, dataclasses.replace(CONFIG, adapter=adapter)):
        weights = run(steps=5, config=config).weights
        adapters = restore_adapters(denoiser.specs, config.adapter, weights, torch.device("cpu"))
        norms.append(max(adapter.product().norm().item() for adapter in adapters.values()))
    assert norms[0] > 0.015 and norms[1] == pytest.approx(0.01)


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
        _fail(denoiser)
    assert all(torch.equal(before[name], tensor) for name, tensor in denoiser.module.state_dict().items())
    assert names == {name: set(vars(module)) for name, module in denoiser.module.named_modules()}


def _fail(denoiser):
    def interrupt(progress, handles):
        raise KeyError("cancelled")

    train(denoiser, TinyDataset(), CONFIG, None, steps=3, on_step=interrupt)


def test_a_weight_buffer_that_every_layer_overwrites_gives_the_same_training():
    assert_same(run(steps=3, denoiser=TinyDenoiser(overwrite=True)), run(steps=3))


def test_checkpointing_leaves_the_training_unchanged():
    memory = MemoryConfig(checkpointing="block")
    assert_same(run(steps=3, config=dataclasses.replace(CONFIG, memory=memory)), run(steps=3))


def by_image(denoiser, batch, config, *, seed, index, compute):
    """The loss with draws that depend on the image alone, so that batches can be cut in different ways."""
    images = [int(name[0]) for name in batch.names]
    noise = [torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(50 + image)) for image in images]
    sigma = torch.tensor([0.2 + 0.2 * image for image in images])
    return loss_at(denoiser, batch, batch.latents, sigma, torch.stack(noise)), sigma


def gradients_of(batch_size, accumulation, dataset=None):
    config = dataclasses.replace(
        CONFIG,
        batch_size=batch_size,
        gradient_accumulation=accumulation,
        optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=0.0),
    )
    denoiser = TinyDenoiser()
    live = LiveState(denoiser, config, run(steps=2), {})
    with denoiser.hold(torch.float32) as base, attach(base.layers, live.adapters):
        loss, _, images = compute_gradients(denoiser, dataset or TinyDataset(), config, live)
    return loss, images, {name: p.grad for name, p in live.parameters.items()}


class Uneven(TinyDataset):
    """A bucket of three images and one of one."""

    def batch(self, size, *, seed, index):
        whole = super().batch(4, seed=seed, index=0)
        part = slice(0, 3) if index % 2 == 0 else slice(3, 4)
        return Batch(whole.latents[part], whole.conditioning[part], whole.names[part])


@pytest.mark.feature(83)
@pytest.mark.parametrize(("size", "accumulation", "dataset"), [(2, 2, None), (1, 4, None), (3, 2, Uneven())])
def test_accumulated_micro_batches_have_the_gradients_of_one_batch(size, accumulation, dataset, monkeypatch):
    monkeypatch.setattr("graft.training.loop.draw_loss", by_image)
    loss, _, whole = gradients_of(4, 1)
    parts_loss, images, parts = gradients_of(size, accumulation, dataset)
    assert images == 4 and parts_loss == pytest.approx(loss, rel=1e-5)
    assert all(torch.allclose(parts[name], whole[name], rtol=1e-4, atol=1e-7) for name in whole)


@pytest.mark.feature(82)
def test_clipping_leaves_the_direction_and_bounds_the_norm():
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients([p], 1.0) == 5.0 and p.grad.tolist() == pytest.approx([0.6, 0.8])
    assert clip_gradients([p], 0.0) == pytest.approx(1.0) and p.grad.tolist() == pytest.approx([0.6, 0.8])


def test_four_images_overfit():
    config = dataclasses.replace(
        CONFIG, batch_size=4, schedule=ScheduleConfig(), optimizer=OptimizerConfig(lr=3e-3)
    )
    losses = run(steps=150, config=config).losses
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
