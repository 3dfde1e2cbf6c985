"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to resume.

A multiplier m(step, total) in 0..1 after warm-up; total is the whole run's, not one node's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from .config import ScheduleConfig


def multiplier(config: ScheduleConfig, step: int) -> float:
    """Return the factor on the learning rate at `step` (counted from 0): linear warm-up, then the named decay.

    Raises ValueError for an unknown schedule, or a decaying one that does not know its total steps.
    """
    if config.name not in SCHEDULES:
        raise ValueError(f"schedule: {config.name!r} is unknown; choose one of {', '.join(SCHEDULES)}.")
    if config.name != "constant" and config.total_steps < 1:
        raise ValueError(f"schedule {config.name!r} needs total steps: the length of the whole run.")
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    length = max(1, config.total_steps - config.warmup_steps)
    return SCHEDULES[config.name](min(1.0, (step - config.warmup_steps) / length))


SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 * (1.0 + math.cos(math.pi * t)),
}
"""Name -> multiplier as a function of progress in 0..1 after warm-up."""
