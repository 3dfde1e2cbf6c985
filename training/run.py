"""A run: training with a key and a folder, so that the same work is never done twice and none is ever lost.

The key digests everything that decides the result except how many steps are asked for, because a longer run passes
through every state of a shorter one. So a finished run costs nothing, a longer one continues, and one that was
cancelled or killed resumes from its last checkpoint, bit-equal to a run that never stopped.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from .checkpoint import StateHandle, open_state, save_state
from .config import TrainConfig, digest, to_dict
from .loop import STOP, OnStep, Progress, ignore, train
from .model import Dataset, Denoiser

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """Where a run keeps its files, and how often it saves."""

    folder: Path
    """<output>/graft/<name>-<key>"""
    checkpoint_minutes: float = 5.0
    keep: int = 2
    """Newest checkpoints that survive; results that a node returned are kept besides."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def run_key(denoiser: Denoiser, dataset: Dataset, config: TrainConfig, start: StateHandle | None) -> str:
    """Return 16 hex digits: equal keys mean that one run passes through the states of the other."""
    return digest(config, dataset.fingerprint, denoiser.fingerprint, start.digest if start else "")


def execute(
    run: Run,
    denoiser: Denoiser,
    dataset: Dataset,
    config: TrainConfig,
    start: StateHandle | None,
    *,
    steps: int,
    on_step: OnStep = ignore,
    notes: Mapping[str, str] = MappingProxyType({}),
) -> StateHandle:
    """Return the state `steps` after `start`, training only what no checkpoint of the run already holds.

    Whatever ends the training early (an error, a cancel of either ComfyUI's kind, `on_step` returning STOP), the last
    whole step is on disk before this function is left.
    """
    first = start.step if start else 0
    target = first + steps
    newest = latest(run, first, target)
    if newest and newest.step == target:
        log.info("Graft: step %d of this run is already trained; nothing to do.", target)
        return newest
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "config.json").write_text(json.dumps(to_dict(config), indent=1), encoding="utf-8")
    if newest:
        log.info("Graft: resuming at step %d of %d.", newest.step, target)
    resume = newest or start
    saver = _Saver(run, on_step)
    try:
        train(
            denoiser,
            dataset,
            config,
            resume.load() if resume else None,
            steps=target - (resume.step if resume else 0),
            on_step=saver,
            notes=notes,
        )
    finally:
        handle = saver.save()
    assert handle is not None
    return handle


def latest(run: Run, first: int, target: int) -> StateHandle | None:
    """Return the newest sound checkpoint after step `first` and up to `target`; damaged ones are passed over."""
    found = sorted(run.checkpoints.glob("step-*"), reverse=True)
    for folder in found:
        try:
            step = int(folder.name.removeprefix("step-"))
            if first < step <= target:
                return open_state(folder)
        except ValueError as error:
            log.warning("Graft: %s Falling back to the checkpoint before it.", error)
    return None


class _Saver:
    """Watches the steps and checkpoints every few minutes."""

    def __init__(self, run: Run, on_step: OnStep) -> None:
        self.run, self.on_step = run, on_step
        self.progress: Progress | None = None
        self.saved: StateHandle | None = None
        self.saved_at = time.monotonic()
        self.own: list[Path] = []

    def __call__(self, progress: Progress) -> str | None:
        self.progress = progress
        if time.monotonic() - self.saved_at > 60 * self.run.checkpoint_minutes:
            self.save()
        return self.on_step(progress)

    def save(self) -> StateHandle | None:
        """Write the last whole step, unless it is on disk already; None before the first step."""
        if self.progress and (self.saved is None or self.saved.step < self.progress.step):
            folder = self.run.checkpoints / f"step-{self.progress.step:08d}"
            self.saved = save_state(self.progress.state(), folder)
            self.own.append(folder)
            for old in self.own[: -self.run.keep]:
                shutil.rmtree(old, ignore_errors=True)
                self.own.remove(old)
        self.saved_at = time.monotonic()
        return self.saved


__all__ = ["STOP", "Run", "execute", "latest", "run_key"]
