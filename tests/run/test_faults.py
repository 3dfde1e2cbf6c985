"""What cannot be imitated: a disk that is really full, a run that really overfits."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from contextlib import nullcontext, suppress

import pytest

from graft.tests.support.runs import CONFIG, assert_same, go
from graft.tests.support.runs import run as train
from graft.training.config import CheckpointConfig, OptimizerConfig, ScheduleConfig, ValidationConfig
from graft.training.run import watch
from graft.training.run.watch import DiskFull
from graft.training.validation import validation_loss

from ..support.tiny import TinyDenoiser, TinySamples


@pytest.mark.feature(102)
@pytest.mark.parametrize("margin", [0, 100_000])
def test_a_full_disk_keeps_what_was_saved_and_the_run_goes_on_with_more_room(small_disk, monkeypatch, margin):
    """With a margin the run stops in time; without one it does when the space that it held had to be used."""
    monkeypatch.setattr(watch, "MARGIN", margin)
    monkeypatch.setattr(watch, "DISK_CHECK_SECONDS", 0.0 if margin else 1e9)
    many = CheckpointConfig(steps=1, keep=100)
    with pytest.raises(OSError, match="Free some space"):
        go(small_disk / "run", 30, saving=many)
    kept = len(list(small_disk.glob("run/checkpoints/*/state.json")))
    assert 0 < kept < 30
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    seen = []
    whole = go(
        small_disk / "run", 30, saving=many, on_step=lambda progress, handles: seen.append(progress.step)
    )
    assert_same(whole.load(), train(steps=30))
    assert min(seen) == kept + 1


@pytest.mark.parametrize("allocates", [True, False], ids=["linux", "others"])
@pytest.mark.parametrize("noticed", [True, False])
def test_a_disk_that_is_full_from_one_step_to_the_next_costs_none(
    small_disk, monkeypatch, noticed, allocates
):
    """Noticed by a look at the disk, or not before the save at the end."""
    if not allocates:
        monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(watch, "MARGIN", 100_000)
    monkeypatch.setattr(watch, "DISK_CHECK_SECONDS", 0.0 if noticed else 1e9)

    def fill_up(progress, handles):
        if progress.step == 3:
            with suppress(OSError), (small_disk / "other").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1000))

    rarely = CheckpointConfig(minutes=60)
    with suppress(DiskFull) if noticed else nullcontext():
        go(small_disk / "run", 5, saving=rarely, on_step=fill_up)
    (small_disk / "other").unlink()
    seen = []
    whole = go(
        small_disk / "run", 6, saving=rarely, on_step=lambda progress, handles: seen.append(progress.step)
    )
    assert_same(whole.load(), train(steps=6))
    assert seen == ([5, 6] if noticed else [6])


def test_a_run_that_needs_the_space_it_held_ends_with_its_checkpoint(small_disk, monkeypatch):
    monkeypatch.setattr(watch, "MARGIN", 0)
    monkeypatch.setattr(watch, "DISK_CHECK_SECONDS", 1e9)

    def fill_up(progress, handles):
        with suppress(OSError), (small_disk / "other").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1000))

    with pytest.raises(DiskFull, match="what is saved of this run is not trained twice"):
        go(small_disk / "run", 5, saving=CheckpointConfig(minutes=0), on_step=fill_up)
    assert len(list(small_disk.glob("run/checkpoints/*/state.json"))) == 2


STEPS = int(os.environ.get("GRAFT_OVERFIT_STEPS", "200"))
"""docs/benchmarks.md has what 2,000 gave."""

OVERFIT = dataclasses.replace(
    CONFIG,
    batch_size=4,
    schedule=ScheduleConfig(),
    adapter=dataclasses.replace(CONFIG.adapter, rank=8),
    optimizer=OptimizerConfig(lr=2e-2),
    validation=ValidationConfig(every=10, limit=2, result="best"),
)


def test_a_run_that_overfits_keeps_its_best_state_and_stops_in_time(tmp_path):
    """Four images: the held-out loss falls, then rises far above where it was lowest."""
    options = {"saving": CheckpointConfig(keep=1), "validation": TinySamples()}
    curve = []
    best = go(tmp_path / "all", STEPS, config=OVERFIT, on_step=following(curve), **options)
    lowest = min(curve)
    assert curve[-1] > 1.1 * lowest
    assert dict(best.load().validations)[best.step] <= 1.1 * lowest and best.step < STEPS
    patient = dataclasses.replace(OVERFIT, validation=dataclasses.replace(OVERFIT.validation, patience=4))
    stopped = []
    early = go(tmp_path / "early", STEPS, config=patient, on_step=following(stopped), **options)
    assert early.step == best.step and len(stopped) == len(curve[: best.step // 10]) + 4
    assert validation_loss(TinyDenoiser(), TinySamples(), state=early.load(), limit=2) <= 1.1 * lowest


def following(curve):
    return lambda progress, handles: progress.validation is None or curve.append(progress.validation)
