"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to resume.

A schedule is a multiple m(t) of the learning rate over the progress t, 0 to 1 after warm-up. The total is
that of the whole run, not of one node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..config import ScheduleConfig
from ..user_error import UserError


def multiplier(config: ScheduleConfig, step: int) -> float:
    """Return the factor on the learning rate at `step`, counted from 0.

    A linear warm-up to 1, then the named decay from 1 to `config.floor`, which also holds after the total
    steps. Raises UserError for an unknown schedule, and for a decaying one without total steps.
    """
    if config.name not in SCHEDULES:
        raise UserError(f"schedule: {config.name!r} is unknown; choose one of {', '.join(SCHEDULES)}.")
    if config.name != "constant" and config.total_steps < 1:
        raise UserError(f"schedule {config.name!r} needs total steps, the length of the whole run.")
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    length = max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / length)
    return config.floor + (1.0 - config.floor) * SCHEDULES[config.name](progress, config)


def schedule_notes(config: ScheduleConfig, total: int) -> list[str]:
    """Return a sentence if warm-up takes all of a run of `total` steps, or the schedule ends before it."""
    if config.name != "constant" and 0 < config.total_steps < total:
        return [
            f"total_steps {config.total_steps}: the steps from there to {total} are trained at "
            f"{multiplier(config, total):.0%} of the learning rate. Raise total_steps for a new run that "
            "decays over all of them, or set the schedule to constant, which can always go on."
        ]
    if not 0 < total <= config.warmup_steps:
        return []
    return [
        f"warmup_steps {config.warmup_steps} of a run of {total} steps: the learning rate rises to the last "
        f"step, where it reaches {multiplier(config, total - 1):.0%}; a twentieth of the steps is usual."
    ]


def cosine(t: float) -> float:
    """(1 + cos(pi t)) / 2 (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5)."""
    return 0.5 * (1.0 + math.cos(math.pi * t))


def restarts(t: float, cycles: int) -> float:
    """`cycles` cosines of equal length, one after the other (arXiv:1608.03983, T_mult = 1)."""
    return 0.0 if t >= 1.0 else cosine(t * cycles % 1.0)


def rex(t: float) -> float:
    """(1 - t) / (1/2 + (1 - t)/2): slow first, then steep (Chen et al. 2021, arXiv:2107.04197, sec. 3)."""
    return (1.0 - t) / (0.5 + 0.5 * (1.0 - t))


SCHEDULES: Mapping[str, Callable[[float, ScheduleConfig], float]] = {
    "constant": lambda t, config: 1.0,
    "linear": lambda t, config: 1.0 - t,
    "cosine": lambda t, config: cosine(t),
    "restarts": lambda t, config: restarts(t, config.cycles),
    "polynomial": lambda t, config: (1.0 - t) ** config.power,
    "rex": lambda t, config: rex(t),
}
"""Name -> multiple of the learning rate at progress 0..1 after warm-up: 1 at the start, 0 at the end."""
