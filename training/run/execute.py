"""A run: training with a key and a folder, so that the same work is never done twice and none is ever lost.

The key digests everything that decides the result except how many steps are asked for, because a longer run
passes through every state of a shorter one. So a finished run costs nothing, a longer one continues, and
one that was cancelled or killed resumes from its last checkpoint, bit-equal to a run that never stopped
(tested on the CPU; a GPU's kernels may round otherwise each time).

The folder holds `config.json`, `queued.json`, `log.jsonl`, `log.csv`, `lock`, `checkpoints/step-<n>/`, LoRAs
in `loras/` and, where wanted, `log.sqlite`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from .. import distributed
from ..config import CheckpointConfig, TrainConfig, digest, to_dict
from ..family import Family
from ..files.lora.metadata import lora_metadata, write_lora
from ..files.lora.read import lora_tensors
from ..files.whole_file import remove_leftovers
from ..live_state import MidStep
from ..log import log
from ..loop import STOP, OnStep, Progress, ignore, initial_state, train
from ..model import Dataset, Denoiser, Samples
from ..signals import defer_signals, raise_if_asked
from ..state import TrainState, best_step
from ..user_error import FileError, UserError
from .lock import lock_folder
from .reserve import Reserve
from .run_log import RunLog
from .saved_state import (
    StateHandle,
    open_state,
    read_values,
    remove_state,
    save_state,
    size_in_bytes,
    write_text,
)

MARGIN = 32 << 20
"""Bytes that a run leaves free on the disk for everything else."""

DISK_CHECK_SECONDS = 5.0

AWAY_SECONDS = 45.0
"""How long a run's end waits for a drive that is away; less than a process that is asked to end still has."""

States = Mapping[int, Callable[[], TrainState]]
"""The states that a run has, by step: each is read when asked for. Raises UserError for a damaged one."""

OnStart = Callable[[States], None]


def ignore_start(states: States) -> None:
    """Do nothing before the first step."""


class DiskFull(FileError):
    """The disk has no room for the next checkpoint; what was trained is saved."""


@dataclass(frozen=True)
class Run:
    """Where a run keeps its files, and how often it saves."""

    folder: Path
    """<output>/graft/<name>-<key>"""
    saving: CheckpointConfig = field(default_factory=CheckpointConfig)
    tensorboard: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @property
    def name(self) -> str:
        """The folder's, without the key."""
        return self.folder.name.rpartition("-")[0]

    def lora(self, step: int) -> Path:
        return self.folder / "loras" / f"{self.name}-{step:06d}.safetensors"

    def is_regular(self, step: int) -> bool:
        """Return whether the settings ask for a checkpoint of just this step."""
        return bool(self.saving.steps) and step % self.saving.steps == 0


def run_key(
    denoiser: Denoiser,
    dataset: Dataset,
    config: TrainConfig,
    start: StateHandle | None,
    validation: Samples | None = None,
) -> str:
    """Return 16 hex digits: equal keys mean that one run passes through the states of the other."""
    held_out = [validation.fingerprint] if validation is not None else []
    validation_config = replace(config.validation, result="last")  # another choice of the same states
    config = replace(config, memory=config.memory.deciding(), validation=validation_config)
    return digest(config, dataset.fingerprint, denoiser.fingerprint, start.digest if start else "", *held_out)


def execute(
    run: Run,
    denoiser: Denoiser,
    dataset: Dataset,
    config: TrainConfig,
    start: StateHandle | None,
    *,
    steps: int,
    on_start: OnStart = ignore_start,
    on_step: OnStep = ignore,
    notes: Mapping[str, str] = MappingProxyType({}),
    validation: Samples | None = None,
) -> StateHandle:
    """Return the state `steps` after `start`, training only what no checkpoint of the run already holds.

    `on_start` is given the states that are there, up to the one that training begins at or a finished run
    ended with, before the base is taken.

    Whatever ends the training early (an error, a cancel of either ComfyUI's kind, SIGTERM, `on_step`
    returning STOP), the last whole step is on disk before this function is left. After STOP it stays the
    run's end for as long as just as many steps are asked for.

    Of several processes that train together, rank 0 does all this, and the others `follow`.

    Raises OSError when the folder cannot be written or the disk is full (DiskFull: the run is saved), and
    UserError when another process is training this run.
    """
    first = start.step if start else 0
    target = first + steps
    if distributed.rank():
        return follow(run, denoiser, dataset, config, target, on_step=on_step, validation=validation)
    with lock_folder(run.folder), defer_signals():
        tidy(run)
        newest = latest(run, first, target)
        begin = start.load if start else partial(initial_state, denoiser, config)
        states = _states(run, first, newest.step if newest else first, begin)
        if newest and is_end(run, newest.step, target):
            log.info("step %d of this run is already trained; nothing to do.", newest.step)
            on_start(states)
            distributed.share(None)
            return hand_on(run, newest, start, config)
        if newest:
            log.info("resuming at step %d of %d.", newest.step, target)
        resume = newest or start
        state = resume.load() if resume else begin()
        if newest and run.saving.lora and run.is_regular(state.step) and not run.lora(state.step).exists():
            write_lora_of(run, state, denoiser.family)  # a kill came between the two
        size = size_in_bytes(state) * (1 if state.optimizer.name else 4)
        require_space(run, size)
        write_text(run.folder / "config.json", json.dumps(to_dict(config), indent=1))
        last = max(_checkpoints(run), default=0)
        logs = {"tensorboard": run.tensorboard, "sqlite": run.saving.sqlite}
        run_log = RunLog(run.folder, state.step, last=last, **logs)
        watch = _Watch(run, denoiser.family, on_step, run_log)
        watch.reserve.hold(size)
        try:
            on_start({**states, state.step: lambda: state})
            distributed.share(state)
            train(
                denoiser,
                dataset,
                config,
                state,
                steps=target - state.step,
                on_step=watch,
                notes=notes,
                validation=validation,
            )
        finally:
            try:
                saved = watch.save_at_last()
            finally:
                watch.reserve.release()
                watch.log.close()  # last: it gets what it lacks where a drive came back
        reached = saved or resume
        assert reached is not None, "a fresh run ends after at least one step"
        if watch.stopped:
            finish(run, reached.step, target)
        return hand_on(run, reached, start, config)


def follow(
    run: Run,
    denoiser: Denoiser,
    dataset: Dataset,
    config: TrainConfig,
    target: int,
    *,
    on_step: OnStep,
    validation: Samples | None,
) -> StateHandle:
    """Train along with rank 0, from the state that it has, and return a copy of the state it hands on."""

    def heed(progress: Progress) -> str | None:
        raise_if_asked()
        return on_step(progress)

    with defer_signals():
        state: TrainState | None = distributed.share(None)
        if state is not None:
            steps = target - state.step
            train(denoiser, dataset, config, state, steps=steps, on_step=heed, validation=validation)
        result: TrainState | None = distributed.share(None)
        assert result is not None, "rank 0 hands on a state, or ends"
        return save_state(result, run.checkpoint(result.step))


def latest(run: Run, first: int, target: int) -> StateHandle | None:
    """Return the newest sound checkpoint after step `first`, up to `target`; damaged ones are passed over."""
    for step, folder in sorted(_checkpoints(run).items(), reverse=True):
        if first < step <= target:
            try:
                return open_state(folder)
            except UserError as error:
                log.warning("%s Falling back to the checkpoint before it.", error)
    return None


def _states(run: Run, first: int, last: int, begin: Callable[[], TrainState]) -> States:
    """Return `begin`, the state of step `first`, and those of the run's checkpoints up to step `last`."""

    def read(folder: Path) -> TrainState:
        return open_state(folder).load()

    saved = {step: partial(read, path) for step, path in _checkpoints(run).items() if first < step <= last}
    return {first: begin, **saved}


def newest(run: Run) -> StateHandle | None:
    """Return the run's newest sound checkpoint."""
    return latest(run, -1, max(_checkpoints(run), default=0))


def saved_steps(run: Run) -> list[int]:
    """Return the steps of the run's checkpoints in order, without a look at what is in them."""
    return sorted(_checkpoints(run))


def run_of(handle: StateHandle) -> Run | None:
    """Return the run that a state is a checkpoint of; None for a state that was saved elsewhere."""
    folder = handle.path.parent
    return Run(folder.parent) if folder.name == "checkpoints" else None


def states_up_to(handle: StateHandle) -> list[StateHandle]:
    """Return the sound checkpoints of the handle's run up to it, in order; it alone when it has no run."""
    run, found = run_of(handle), []
    for step, folder in sorted(_checkpoints(run).items()) if run else ():
        if step < handle.step:
            with suppress(UserError):
                found.append(open_state(folder))
    return [*found, handle]


def best(run: Run, handle: StateHandle, start: StateHandle | None) -> StateHandle:
    """Return the state with the lowest validation loss on the way to `handle`, which may lie before the run's
    start; `handle` itself without one."""
    validations = read_values(handle.path)["validations"]
    step = best_step(validations)
    if start and validations and step == start.step:
        return start
    before = run_of(start) if start and step < start.step else None
    with suppress(UserError):
        return open_state((before or run).checkpoint(step))
    return handle


def handed_on(run: Run, start: StateHandle | None, last: int, config: TrainConfig) -> StateHandle:
    """Return what a run from `start` to step `last` handed on, also one that was finished before `last`.

    Raises UserError when none of its states is there.
    """
    first = start.step if start else 0
    found = latest(run, first, last)
    if found is None:
        raise UserError(
            f"{run.folder}: no training state after step {first} here, though this run was trained before. "
            "If it was deleted, free ComfyUI's model and node cache and queue the graph again; it is then "
            "trained anew."
        )
    return _result(run, found, start, config)


def _result(run: Run, handle: StateHandle, start: StateHandle | None, config: TrainConfig) -> StateHandle:
    return best(run, handle, start) if config.validation.result == "best" else handle


def hand_on(run: Run, handle: StateHandle, start: StateHandle | None, config: TrainConfig) -> StateHandle:
    """Return the state that the run's end hands on, marked so that no later run of this folder removes it."""
    handle = _result(run, handle, start, config)
    with suppress(OSError):  # a disk without room for an empty file; the state itself is there
        (handle.path / KEPT).touch()
    if distributed.world() > 1:
        distributed.share(handle.load())
    return handle


def finish(run: Run, step: int, target: int) -> None:
    """Note that Finish ended the run at `step` when step `target` had been asked for."""
    with suppress(OSError):
        (run.checkpoint(step) / FINISHED).write_text(str(target), encoding="utf-8")


def is_end(run: Run, step: int, target: int) -> bool:
    """Return whether the run to step `target` ends at `step`: they are one, or Finish was pressed there when
    `target` had been asked for. Whoever asks for another number wants the run to go on.
    """
    if step == target:
        return True
    try:
        return target == int((run.checkpoint(step) / FINISHED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


FINISHED = "finished"
"""File in the folder of a checkpoint at which Finish was pressed: the step that had been asked for."""

KEPT = "kept"
"""File in the folder of a checkpoint that a node handed on: a graph may hold it."""


def tidy(run: Run) -> None:
    """Remove what a killed run left half-written: files of temporary names, and folders without a state."""
    for folder in (run.folder, run.folder / "loras", run.folder / "samples"):
        remove_leftovers(folder)
    for folder in _checkpoints(run).values():
        remove_leftovers(folder)
        if not (folder / "state.json").exists():
            remove_state(folder)


def prune(run: Run, step: int, best: int) -> None:
    """Remove checkpoints up to `step` other than the newest two, the newest regular ones, the best and those
    that were handed on; and LoRA files with them, but for those of steps that the settings name.

    Those beyond `step` belong to a longer run of the same graph, and stay.
    """
    past = sorted(known for known in _checkpoints(run) if known <= step)
    regular = [known for known in past if run.is_regular(known)] if run.saving.steps else past
    for known in set(past) - {*past[-2:], best, *regular[-run.saving.keep :]}:
        folder = run.checkpoint(known)
        if not (folder / KEPT).exists():
            if not run.is_regular(known):  # first: killed in between, the state is pruned next time
                with suppress(OSError):  # Windows keeps what a Load LoRA has read
                    run.lora(known).unlink(missing_ok=True)
            remove_state(folder)


def require_space(run: Run, needed: int, held: int = 0) -> None:
    """Raise DiskFull unless `needed` bytes and a margin are free, or `held`, where the run is kept."""
    free = shutil.disk_usage(run.folder).free + held
    if free < needed + MARGIN:
        raise DiskFull(
            f"{run.folder}: {free >> 20} MB are free, and a checkpoint needs {(needed + MARGIN) >> 20} MB. "
            "Free some space and queue the graph again: what is saved of this run is not trained twice."
        )


def write_lora_of(run: Run, state: TrainState, family: Family) -> None:
    """Write the LoRA file of a checkpoint; without room for it, the run goes on without."""
    result = replace(state, weights=state.result())
    tensors = lora_tensors(result, family, torch.bfloat16)
    metadata = lora_metadata(result, family, title=f"{run.name} at step {state.step}")
    try:
        write_lora(run.lora(state.step), tensors, metadata)
    except OSError as error:
        log.warning("the LoRA file of step %d could not be written (%s).", state.step, error)


class _Watch:
    """Follows a run step by step: log, checkpoints, disk space, signals, then whoever else wants to know."""

    def __init__(self, run: Run, family: Family, on_step: OnStep, run_log: RunLog) -> None:
        self.run, self.family, self.on_step, self.log = run, family, on_step, run_log
        self.progress: Progress | None = None
        self.saved: StateHandle | None = None
        self.saved_at = self.checked_at = time.monotonic()
        self.size = 0
        """Of a checkpoint, once one was to be written."""
        self.stopped = False
        """By `on_step`: Finish was pressed."""
        self.reserve = Reserve(run.folder)

    def __call__(self, progress: Progress) -> str | None:
        self.progress = progress
        self.log.write(progress)
        if self.due(progress):
            self.save_if_possible()
        self.check_disk()
        raise_if_asked()
        outcome = self.on_step(progress)
        self.stopped = outcome == STOP
        return outcome

    def due(self, progress: Progress) -> bool:
        late = time.monotonic() - self.saved_at >= 60 * self.run.saving.minutes
        return progress.best or late or self.run.is_regular(progress.step)

    def save_if_possible(self) -> None:
        """Save; a folder locked or gone for a moment is reported, and tried again at the next save."""
        try:
            self.save()
        except OSError as error:
            self.saved_at = time.monotonic()
            log.warning("%s could not be saved (%s); training goes on.", self.run.folder, error)

    def save_at_last(self) -> StateHandle | None:
        """Save at the run's end: what was trained is nowhere else, so a drive that is away is waited for.

        Raises OSError naming the folder, and what is lost, when the drive is full or does not come back.
        """
        until = time.monotonic() + AWAY_SECONDS
        while True:
            try:
                return self.save()
            except OSError as error:
                if self.is_full() or time.monotonic() >= until:
                    kept = f"step {self.saved.step}" if self.saved else "the step that it began at"
                    raise FileError(
                        f"{self.run.folder}: the run could not be saved ({error}). What it trained after "
                        f"{kept} is lost. Bring the drive back, or free some space there, and queue the "
                        "graph again."
                    ) from error
                log.warning("%s could not be saved (%s); trying again.", self.run.folder, error)
                time.sleep(3.0)

    def is_full(self) -> bool:
        """Return whether the disk is there, but has no room for a checkpoint."""
        try:
            self.require_space()
        except DiskFull:
            return True
        except OSError:  # away
            pass
        return False

    def save(self) -> StateHandle | None:
        """Write the last whole step, unless it is on disk already; None before the first step."""
        if self.progress and (self.saved is None or self.saved.step < self.progress.step):
            try:
                state = self.progress.state()
            except MidStep as error:
                log.warning("%s", error)
                return self.saved
            self.write(state)
        return self.saved

    def require_space(self) -> None:
        require_space(self.run, self.size + self.size // 4, self.reserve.size)

    def write(self, state: TrainState) -> None:
        self.size = size_in_bytes(state)
        folder = self.run.checkpoint(state.step)
        try:
            self.saved = save_state(state, folder)
        except OSError:
            if not self.reserve.release():
                raise
            self.saved = save_state(state, folder)
            self.checked_at = -math.inf
        if self.run.saving.lora:
            write_lora_of(self.run, state, self.family)
        self.saved_at = time.monotonic()
        prune(self.run, state.step, best_step(state.validations))
        self.reserve.hold(self.size)

    def check_disk(self) -> None:
        """Save and stop while the disk still has room for one checkpoint but hardly for another."""
        if time.monotonic() - self.checked_at < DISK_CHECK_SECONDS or not self.progress:
            return
        self.checked_at = time.monotonic()
        self.size = self.size or size_in_bytes(self.progress.state())
        try:
            self.require_space()
        except DiskFull:
            self.save()
            raise
        except OSError:  # the drive is away for a moment
            pass


def _checkpoints(run: Run) -> dict[int, Path]:
    """Return the run's checkpoint folders by step."""
    found = (
        (re.fullmatch(r"step-(\d{8,})", folder.name), folder) for folder in run.checkpoints.glob("step-*")
    )
    return {int(match[1]): folder for match, folder in found if match and folder.is_dir()}
