"""Runs of the tiny denoiser, with and without a folder, and functions to watch, end and compare them."""

from __future__ import annotations

import torch

from graft.training.config import (
    AdapterConfig,
    CheckpointConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from graft.training.loop import STOP, train
from graft.training.run.execute import execute
from graft.training.run.folder import Run

from .tiny import TinyDataset, TinyDenoiser

CONFIG = TrainConfig(
    batch_size=2,
    seed=7,
    adapter=AdapterConfig(rank=4, alpha=2.0, targets="all"),
    optimizer=OptimizerConfig(lr=1e-3),
    schedule=ScheduleConfig(name="cosine", warmup_steps=2, total_steps=20),
)

EVERY_STEP = CheckpointConfig(minutes=0)


def run(state=None, *, steps, config=CONFIG, denoiser=None):
    """Train without a folder."""
    return train(denoiser or TinyDenoiser(), TinyDataset(), config, state, steps=steps)


def assert_same(a, b):
    assert (a.step, a.losses, a.validations, a.loss_scale) == (b.step, b.losses, b.validations, b.loss_scale)
    assert (a.optimizer.values, a.optimizer.groups) == (b.optimizer.values, b.optimizer.groups)
    for one, other in ((a.weights, b.weights), (a.optimizer.tensors, b.optimizer.tensors), (a.ema, b.ema)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


class Cancelled(BaseException):
    """ComfyUI's interrupt is an Exception in one version and a BaseException in another."""


def go(
    folder,
    steps,
    *,
    on_step=lambda progress, handles: None,
    start=None,
    config=CONFIG,
    saving=EVERY_STEP,
    **options,
):
    return execute(
        Run(folder, saving),
        TinyDenoiser(),
        TinyDataset(),
        config,
        start,
        steps=steps,
        on_step=on_step,
        **options,
    )


def counting(seen):
    return lambda progress, handles: seen.append(progress.step)


def failing_at(step, error):
    def on_step(progress, handles):
        if progress.step == step:
            raise error

    return on_step


def checkpoints(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def finish_at(step):
    return lambda progress, handles: STOP if progress.step == step else None
