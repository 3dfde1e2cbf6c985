"""Notes on why a new run starts from step 0 instead of continuing an earlier one.

Changing a setting that decides the result makes another run, in a folder of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config import TrainConfig, from_dict
from .checkpoints import Checkpoints
from .folder import Run
from .saved_state import StateHandle, read_object

SHOWN = 4
"""Differences that are listed at most."""


def new_run_notes(run: Run, config: TrainConfig, start: StateHandle | None, last: int) -> list[str]:
    """Return a sentence if Finish ended `run` before step `last`, or if it has no checkpoint to go on from
    while the last run of its name has; none if `start` comes from that run.
    """
    checkpoints = Checkpoints(run)
    saved = checkpoints.steps()
    step = max((step for step in saved if step <= last), default=last)
    if step < last and checkpoints.is_end(step, last):
        return [f"ended by Finish at step {step} of {last}; any other number of steps above {step} goes on."]
    if saved:
        return []
    others = [Run(path.parent) for path in run.folder.parent.glob(f"{run.name}-*/config.json")]
    for other in sorted(others, key=_changed_at, reverse=True):
        reached = Checkpoints(other).steps() if other.name == run.name else []
        if not reached:
            continue
        if start is not None and other.folder in start.path.parents:
            return []
        return [
            f"this is a new run, not more steps of {other.folder.name} (step {reached[-1]}): "
            f"{describe_differences(read_settings(other), _flat(config))}. To go on from there, load that "
            "name with Load Training State and connect it to start."
        ]
    return []


def describe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a sentence of the settings that changed, or one that the difference lies elsewhere."""
    changed = changed_settings(before, now)
    listed = [f"{name} is {value!r}, was {old!r}" for name, old, value in changed[:SHOWN]]
    if len(changed) > SHOWN:
        listed.append(f"{len(changed) - SHOWN} more settings differ")
    return "; ".join(listed) or "the images, their captions, the base model or the start are different"


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (setting, value before, value now) of each setting that both have and that differs."""
    return [(name, before[name], now[name]) for name in now if name in before and before[name] != now[name]]


def read_settings(run: Run) -> dict[str, Any]:
    """Return the settings that decide a run's result, flat: {"optimizer.lr": ...}; none if an older Graft
    wrote them in another form.
    """
    with suppress(OSError, ValueError):
        return _flat(from_dict(TrainConfig, read_object(run.folder / "config.json")))
    return {}


def _flat(config: TrainConfig) -> dict[str, Any]:
    """Return what decides the result, flat: {"optimizer.lr": ...}."""
    nested = asdict(replace(config, memory=config.memory.deciding()))
    return {
        f"{part}.{name}" if isinstance(values, dict) else part: value
        for part, values in nested.items()
        for name, value in (values.items() if isinstance(values, dict) else [(part, values)])
    }


def _changed_at(run: Run) -> float:
    path: Path = run.folder / "config.json"
    return path.stat().st_mtime if path.exists() else 0.0
