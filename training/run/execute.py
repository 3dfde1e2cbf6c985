"""A run: training with a key and a folder, so that no step is trained twice and none is lost.

The key is a digest of everything that decides the result except the number of steps, because a longer run
passes through every state of a shorter one. So a finished run costs nothing, a longer one continues it, and
one that was cancelled or killed resumes from its last checkpoint, bit-equal to a run that never stopped
(tested on the CPU; a GPU's kernels may round differently each time).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from .. import distributed
from ..config import ObjectiveConfig, TrainConfig, digest, to_dict
from ..log import log
from ..loop import Handles, OnStep, Progress, ignore, initial_state, train
from ..model import Dataset, Denoiser, Samples
from ..signals import defer_signals, raise_if_asked
from ..state import TrainState
from .checkpoints import Checkpoints, States
from .folder import Run
from .kept_objective import keep_objective
from .lock import lock_folder
from .saved_state import StateHandle, save_state, write_text
from .watch import Watch, save_lora

OnStart = Callable[[States], None]


def ignore_start(states: States) -> None:
    """Do nothing before the first step."""


def run_key(
    denoiser: Denoiser,
    dataset: Dataset,
    config: TrainConfig,
    start: StateHandle | None,
    validation: Samples | None = None,
) -> str:
    """Return 16 hex digits. Runs with equal keys pass through the same states."""
    held_out = [validation.fingerprint] if validation is not None else []
    validation_config = replace(config.validation, result="last")  # "best" picks from the same states
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
    """Return the state `steps` after `start`, training only what no checkpoint of the run holds yet.

    `on_start` is called before the base is taken, with the run's states up to the one that training begins
    at, or that a finished run ended with.

    However the training ends (an error, either kind of ComfyUI's cancel, SIGTERM, STOP from `on_step`), the
    last whole step is on disk when this function is left. After STOP, the run counts as finished until it is
    asked for another number of steps.

    When several processes train together, rank 0 does all this and the others `follow`.

    Raises OSError when the folder cannot be written or the disk is full (DiskFull: the run is saved), and
    UserError when another process is training this run.
    """
    first = start.step if start else 0
    target = first + steps
    if distributed.rank():
        return follow(run, denoiser, dataset, config, target, on_step=on_step, validation=validation)
    checkpoints = Checkpoints(run)
    with lock_folder(run.folder), defer_signals():
        # What is there already?
        checkpoints.tidy()
        newest = checkpoints.latest(after=first, up_to=target)
        load_start = start.load if start else partial(initial_state, denoiser, config)
        done = newest.step if newest else first
        states = {first: load_start, **checkpoints.states(after=first, up_to=done)}
        if newest and checkpoints.is_end(done, target):
            log.info("step %d of this run is already trained; nothing to do.", done)
            on_start(states)
            distributed.share(None)  # no state to train from
            return _hand_on(checkpoints, newest, start, config)

        # Where does training begin?
        resumed = newest or start
        state = resumed.load() if resumed else load_start()
        if newest:
            log.info("resuming at step %d of %d.", newest.step, target)
            if run.saving.lora and run.is_regular(newest.step) and not run.lora(newest.step).exists():
                save_lora(run, state, denoiser.family)  # a kill came between the checkpoint and its LoRA

        # Train; the watch saves on every exit.
        with Watch(run, denoiser.family, state, on_step) as watch:
            write_text(run.folder / "config.json", json.dumps(to_dict(config), indent=1))
            on_start({**states, state.step: lambda: state})
            objective = keep_objective(run, config.objective, denoiser.family)
            distributed.share((state, objective))
            train(
                denoiser,
                dataset,
                replace(config, objective=objective),
                state,
                steps=target - state.step,
                on_step=watch,
                notes=notes,
                validation=validation,
            )
        reached = watch.saved or resumed
        assert reached is not None, "a fresh run ends after at least one step"
        if watch.stopped:
            checkpoints.finish(reached.step, target)
        return _hand_on(checkpoints, reached, start, config)


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
    """Train along with rank 0, from the state that it shares, and return a copy of the state it hands on."""

    def answer_signals(progress: Progress, handles: Handles) -> str | None:
        raise_if_asked()
        return on_step(progress, handles)

    with defer_signals():
        shared: tuple[TrainState, ObjectiveConfig] | None = distributed.share(None)
        if shared is not None:
            state, objective = shared
            train(
                denoiser,
                dataset,
                replace(config, objective=objective),
                state,
                steps=target - state.step,
                on_step=answer_signals,
                validation=validation,
            )
        result: TrainState | None = distributed.share(None)
        assert result is not None, "rank 0 hands on a state, or ends"
        return save_state(result, run.checkpoint(result.step))


def _hand_on(
    checkpoints: Checkpoints, handle: StateHandle, start: StateHandle | None, config: TrainConfig
) -> StateHandle:
    """Return the state that the run hands on, pinned and shared with the processes that follow."""
    result = checkpoints.choose_result(handle, start, config)
    checkpoints.pin(result)
    if distributed.world() > 1:
        distributed.share(result.load())
    return result
