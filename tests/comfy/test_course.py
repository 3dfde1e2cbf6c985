"""What shows only over the course of a run, or in the numbers of a batch, on ComfyUI's own classes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from graft.tests.support.tiny_models import TINY
from graft.tests.support.two_steps import CONFIG, Samples
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import MemoryConfig, ObjectiveConfig, ValidationConfig
from graft.training.loop import train
from graft.training.memory.precision import DTYPES
from graft.training.objective.loss import draw_loss
from graft.training.run.execute import execute
from graft.training.run.folder import Run

on_each = pytest.mark.parametrize("name", ["sdxl", "sd35m", "flux"])


class HeldOut(Samples):
    """Two images that are not trained on, one by one."""

    fingerprint = "held out"

    def __len__(self):
        return 2

    def sample(self, index):
        return self.tiny.batch((5 + index,))


@pytest.mark.feature(60, 123)
@pytest.mark.parametrize(("name", "lr"), [("sdxl", 0.1), ("sd35m", 1e-2), ("flux", 1e-2)])
def test_a_run_that_overfits_ends_early_and_hands_on_its_best_state(name, lr, tmp_path):
    validation = ValidationConfig(every=2, patience=2, result="best")
    config = replace(CONFIG, validation=validation, optimizer=replace(CONFIG.optimizer, lr=lr))
    denoiser, tiny, seen = ComfyDenoiser(TINY[name]()), TINY[name], {}

    def on_step(progress, handles):
        if progress.validation is not None:
            seen[progress.step] = progress.validation, handles.state()

    given = execute(
        *(Run(tmp_path / "run"), denoiser, Samples(tiny), config, None),
        steps=40,
        on_step=on_step,
        validation=HeldOut(tiny),
    ).load()
    best = min(seen, key=lambda step: seen[step][0])
    assert 2 <= best < 40 and max(seen) == best + 4, {step: loss for step, (loss, _) in seen.items()}
    assert given.step == best
    assert all(torch.equal(given.weights[key], tensor) for key, tensor in seen[best][1].weights.items())


def loss(denoiser, batch, **settings):
    with torch.no_grad(), denoiser.hold(torch.float32):
        return draw_loss(denoiser, batch, ObjectiveConfig(**settings), seed=0, index=0)[0].item()


@pytest.mark.feature(59, 127)
@on_each
def test_masks_and_weights_count_as_far_as_they_say(name):
    denoiser, batch = ComfyDenoiser(TINY[name]()), TINY[name].batch()
    whole = loss(denoiser, batch)
    one, other = (loss(denoiser, replace(batch, weights=torch.eye(2)[i])) for i in range(2))
    assert one + other == pytest.approx(whole) and min(one, other) > 0
    weighed = replace(batch, weights=torch.tensor([1.0, 0.3]))
    assert loss(denoiser, weighed) == pytest.approx(one + 0.3 * other)
    guided = loss(denoiser, weighed, differential_guidance=3.0)
    assert guided == pytest.approx(9 * loss(denoiser, weighed))  # a squared error three times as far

    left = torch.zeros(2, 1, *batch.latents.shape[-2:])
    left[..., :3] = 1.0
    masks = (torch.ones_like(left), left, 1 - left)
    full, near, far = (loss(denoiser, replace(batch, masks=mask)) for mask in masks)
    assert full == pytest.approx(whole) and not math.isclose(near, far)
    assert near * 3 / 8 + far * 5 / 8 == pytest.approx(whole)  # each the mean of its own part


@pytest.mark.feature(85)
@pytest.mark.parametrize(("name", "dtype"), [("sdxl", "fp16"), ("flux", "fp16"), ("sd35m", "bf16")])
def test_the_network_is_computed_in_the_chosen_format(name, dtype):
    denoiser, seen = ComfyDenoiser(TINY[name]()), []
    config = replace(CONFIG, memory=MemoryConfig(dtype=dtype))
    layers = [
        module
        for path, module in denoiser.network.named_modules()
        if "block" in path and not list(module.children())
    ]
    hooks = [
        module.register_forward_hook(lambda m, inputs, output: seen.append(output.dtype)) for module in layers
    ]
    half = train(denoiser, Samples(TINY[name]), config, None, steps=20)
    for hook in hooks:
        hook.remove()
    assert set(seen) == {DTYPES[dtype]}
    whole = train(denoiser, Samples(TINY[name]), CONFIG, None, steps=20)
    assert half.losses == pytest.approx(whole.losses, rel=0.1) and half.losses != whole.losses
    assert half.losses[-1] < 0.9 * half.losses[0]
    assert (half.loss_scale is not None) == (dtype == "fp16")
