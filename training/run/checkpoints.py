"""The checkpoints of a run: which are sound, which one is the result, which are pinned and which may go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..config import TrainConfig
from ..files.whole_file import remove_leftovers
from ..log import log
from ..state import TrainState, best_step
from ..user_error import UserError
from .folder import Run
from .saved_state import StateHandle, open_state, read_values, remove_state

NAME = re.compile(r"step-(\d{8,})", re.ASCII)

FINISHED = "finished"
"""File in the folder of a checkpoint at which Finish was pressed: the target step of that run, in digits."""

PINNED = "kept"
"""Empty file in the folder of a checkpoint that a node handed on: a graph may still refer to it."""

States = Mapping[int, Callable[[], TrainState]]
"""By step, functions that load the state. They raise UserError for a damaged one."""


class Checkpoints:
    """The checkpoints of one run, read from its folder at every call. Damaged ones are passed over."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def folders(self) -> dict[int, Path]:
        """Return the folders of all checkpoints by step, sound or not."""
        paths = [path for path in self.run.checkpoints.glob("step-*") if path.is_dir()]
        return {int(match[1]): path for path in paths if (match := NAME.fullmatch(path.name))}

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in order, sound or not."""
        return sorted(self.folders())

    def latest(self, *, after: int = -1, up_to: int | None = None) -> StateHandle | None:
        """Return the newest sound checkpoint in after < step <= up_to."""
        for step, folder in sorted(self.folders().items(), reverse=True):
            if after < step and (up_to is None or step <= up_to):
                try:
                    return open_state(folder)
                except UserError as error:
                    log.warning("%s Falling back to the checkpoint before it.", error)
        return None

    def leading_to(self, handle: StateHandle) -> list[StateHandle]:
        """Return the sound checkpoints before `handle` in order, and `handle` itself."""
        handles = []
        for step, folder in sorted(self.folders().items()):
            if step < handle.step:
                with suppress(UserError):
                    handles.append(open_state(folder))
        return [*handles, handle]

    def states(self, *, after: int, up_to: int) -> States:
        """Return the states in after < step <= up_to, to be loaded when they are needed."""

        def load(folder: Path) -> TrainState:
            return open_state(folder).load()

        return {step: partial(load, path) for step, path in self.folders().items() if after < step <= up_to}

    def best(self, handle: StateHandle, start: StateHandle | None) -> StateHandle:
        """Return the state with the lowest validation loss on the way to `handle`; `handle` itself if there
        was no validation. The best state may be `start`, or lie in the run that `start` comes from."""
        validations = read_values(handle.path)["validations"]
        step = best_step(validations)
        if start and validations and step == start.step:
            return start
        earlier_run = Run.of(start) if start and step < start.step else None
        with suppress(UserError):
            return open_state((earlier_run or self.run).checkpoint(step))
        return handle

    def choose_result(
        self, handle: StateHandle, start: StateHandle | None, config: TrainConfig
    ) -> StateHandle:
        """Return what a run that ended with `handle` hands on: that state, or the best one if the settings
        ask for it."""
        return self.best(handle, start) if config.validation.result == "best" else handle

    def find_result(self, start: StateHandle | None, target: int, config: TrainConfig) -> StateHandle:
        """Return what a finished run from `start` to step `target` handed on, also if it ended early.

        Raises UserError when the run has no sound checkpoint after `start`.
        """
        first = start.step if start else 0
        handle = self.latest(after=first, up_to=target)
        if handle is None:
            raise UserError(
                f"{self.run.folder}: no training state after step {first} here, though this run was trained "
                "before. If you deleted it, free ComfyUI's model and node cache and queue the graph again to "
                "train it anew."
            )
        return self.choose_result(handle, start, config)

    def pin(self, handle: StateHandle) -> None:
        """Mark a state, so that no later run of this folder removes it."""
        with suppress(OSError):  # the disk may be too full for an empty file; the state itself is there
            (handle.path / PINNED).touch()

    def finish(self, step: int, target: int) -> None:
        """Record that Finish ended the run at `step` on its way to `target`."""
        with suppress(OSError):
            (self.run.checkpoint(step) / FINISHED).write_text(str(target), encoding="utf-8")

    def is_end(self, step: int, target: int) -> bool:
        """Return whether the run to step `target` ends at `step`: it is the target, or Finish was pressed
        there on the way to the same target. Asking for any other number of steps continues the run.
        """
        if step == target:
            return True
        try:
            return target == int((self.run.checkpoint(step) / FINISHED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False

    def tidy(self) -> None:
        """Remove what a killed run left half-written: temporary files, and folders without a state."""
        for folder in (self.run.folder, self.run.folder / "loras", self.run.folder / "samples"):
            remove_leftovers(folder)
        for folder in self.folders().values():
            remove_leftovers(folder)
            if not (folder / "state.json").exists():
                remove_state(folder)

    def prune(self, step: int, best: int) -> None:
        """Remove the checkpoints up to `step`, except the last two, the last regular ones, the best one and
        pinned ones. Their LoRA files go too, except at steps that the settings ask for.

        Checkpoints beyond `step` belong to a longer run of the same graph and stay.
        """
        past = [known for known in self.steps() if known <= step]
        regular = [known for known in past if self.run.is_regular(known)] if self.run.saving.steps else past
        for known in set(past) - {*past[-2:], best, *regular[-self.run.saving.keep :]}:
            folder = self.run.checkpoint(known)
            if not (folder / PINNED).exists():
                if not self.run.is_regular(known):  # first: after a kill, the state is still there
                    with suppress(OSError):  # Windows removes no file that a Load LoRA has read
                        self.run.lora(known).unlink(missing_ok=True)
                remove_state(folder)
