"""The work around the steps of a run: its log, its checkpoints, and a disk that fills up or disappears."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from types import TracebackType

import torch

from ..family import Family
from ..files.lora.metadata import lora_metadata
from ..files.lora.write import lora_tensors, write_lora
from ..live_state import MidStep
from ..log import log
from ..loop import STOP, Handles, OnStep, Progress
from ..signals import raise_if_asked
from ..state import TrainState, best_step
from ..user_error import FileError
from .checkpoints import Checkpoints
from .disk_reserve import DiskReserve
from .folder import Run
from .run_log import RunLog
from .saved_state import StateHandle, save_state, size_in_bytes

MARGIN = 32 << 20
"""Bytes that a run leaves free on the disk for everything else."""

DISK_CHECK_SECONDS = 5.0

AWAY_SECONDS = 45.0
"""How long the last save waits for a drive that is away. A process that was asked to end has longer."""

RETRY_SECONDS = 3.0

SAVE = "save"
"""What `on_step` returns to have this step saved, with its LoRA, and kept."""


class DiskFull(FileError):
    """The disk has no room for the next checkpoint; what was trained is saved."""


class Watch:
    """Follows a run step by step. Entered around the training; saves the last whole step on every exit."""

    def __init__(self, run: Run, family: Family, state: TrainState, on_step: OnStep) -> None:
        self.run, self.family, self.on_step = run, family, on_step
        self.checkpoints = Checkpoints(run)
        self.first = state.step
        self.size = size_in_bytes(state) * (1 if state.optimizer.name else 4)
        """Bytes of a checkpoint; estimated until the first one is written."""
        self.reserve = DiskReserve(run.folder)
        self.step = state.step
        """The last one done."""
        self.handles: Handles | None = None
        """Of that step; None before the first one."""
        self.saved: StateHandle | None = None
        self.saved_at = self.checked_at = time.monotonic()
        self.stopped = False
        """Whether `on_step` returned STOP: Finish was pressed."""

    def __enter__(self) -> Watch:
        """Open the log and reserve disk space. Raises DiskFull if a checkpoint would not fit."""
        require_space(self.run, self.size)
        last = max(self.checkpoints.steps(), default=0)
        logs = {"tensorboard": self.run.tensorboard, "sqlite": self.run.saving.sqlite}
        self.log = RunLog(self.run.folder, self.first, last=last, **logs)
        self.reserve.hold(self.size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.save_at_end()
        finally:
            self.reserve.release()
            self.log.close()  # last: if a drive came back, the log gets the lines it lacks

    def __call__(self, progress: Progress, handles: Handles) -> str | None:
        """Log a step, save if it is time, and return what `on_step` returns."""
        self.step, self.handles = progress.step, handles
        self.log.write(progress)
        if self.is_due(progress):
            self.try_to_save()
        self.check_disk()
        raise_if_asked()
        outcome = self.on_step(progress, handles)
        self.stopped = outcome == STOP
        if outcome == SAVE:
            self.save_on_request()
        return outcome

    def is_due(self, progress: Progress) -> bool:
        late = time.monotonic() - self.saved_at >= 60 * self.run.saving.minutes
        return progress.best or late or self.run.is_regular(progress.step)

    def try_to_save(self) -> None:
        """Save. A folder that is locked or away for a moment costs a warning; the next save tries again."""
        try:
            self.save()
        except OSError as error:
            self.saved_at = time.monotonic()
            log.warning("%s could not be saved (%s); training goes on.", self.run.folder, error)

    def save_on_request(self) -> None:
        """Save this step and pin it; write its LoRA whatever the settings are."""
        self.try_to_save()
        if self.saved and self.saved.step == self.step:
            self.checkpoints.pin(self.saved)
            if not self.run.lora(self.step).exists():
                save_lora(self.run, self.saved.load(), self.family)

    def save_at_end(self) -> None:
        """Save, waiting for a drive that is away: what was trained since the last save is nowhere else.

        Raises OSError that names the folder and what is lost, when the disk is full or does not come back.
        """
        until = time.monotonic() + AWAY_SECONDS
        while True:
            try:
                self.save()
                return
            except OSError as error:
                if self.is_disk_full() or time.monotonic() >= until:
                    last = f"step {self.saved.step}" if self.saved else f"step {self.first}, where it began,"
                    raise FileError(
                        f"{self.run.folder}: the run could not be saved ({error}). What it trained after "
                        f"{last} is lost. Bring the drive back, or free some space there, and queue the "
                        "graph again."
                    ) from error
                log.warning("%s could not be saved (%s); trying again.", self.run.folder, error)
                time.sleep(RETRY_SECONDS)

    def save(self) -> None:
        """Write the last whole step, unless there is none or it is on disk already. Raises OSError."""
        if self.handles and (self.saved is None or self.saved.step < self.step):
            try:
                state = self.handles.state()
            except MidStep as error:
                log.warning("%s", error)
                return
            self.write(state)

    def write(self, state: TrainState) -> None:
        """Write a checkpoint and its LoRA, then remove checkpoints that are no longer needed."""
        self.size = size_in_bytes(state)
        folder = self.run.checkpoint(state.step)
        try:
            self.saved = save_state(state, folder)
        except OSError:
            if not self.reserve.release():
                raise
            self.saved = save_state(state, folder)  # the reserve was held for this moment
            self.checked_at = -math.inf
        if self.run.saving.lora:
            save_lora(self.run, state, self.family)
        self.saved_at = time.monotonic()
        self.checkpoints.prune(state.step, best_step(state.validations))
        self.reserve.hold(self.size)

    def check_disk(self) -> None:
        """Save and stop while the disk still has room for one checkpoint, but hardly for another.

        Raises DiskFull.
        """
        if time.monotonic() - self.checked_at < DISK_CHECK_SECONDS:
            return
        self.checked_at = time.monotonic()
        try:
            self.require_space()
        except DiskFull:
            self.save()
            raise
        except OSError:  # the drive is away for a moment
            pass

    def is_disk_full(self) -> bool:
        """Return whether the disk is there, but has no room for a checkpoint."""
        try:
            self.require_space()
        except DiskFull:
            return True
        except OSError:  # away
            pass
        return False

    def require_space(self) -> None:
        require_space(self.run, self.size + self.size // 4, self.reserve.size)


def require_space(run: Run, needed: int, reserved: int = 0) -> None:
    """Raise DiskFull unless the disk of the run's folder has `needed` bytes and MARGIN free, counting the
    `reserved` ones."""
    free = shutil.disk_usage(run.folder).free + reserved
    if free < needed + MARGIN:
        raise DiskFull(
            f"{run.folder}: {free >> 20} MB are free, and a checkpoint needs {(needed + MARGIN) >> 20} MB. "
            "Free some space and queue the graph again: what is saved of this run is not trained twice."
        )


def save_lora(run: Run, state: TrainState, family: Family) -> None:
    """Write the LoRA file of a checkpoint. If it cannot be written, the run goes on without it."""
    result = replace(state, weights=state.result())
    tensors = lora_tensors(result, family, torch.bfloat16)
    metadata = lora_metadata(result, family, title=f"{run.name} at step {state.step}")
    try:
        write_lora(run.lora(state.step), tensors, metadata)
    except OSError as error:
        log.warning("the LoRA file of step %d could not be written (%s).", state.step, error)
