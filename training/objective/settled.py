"""The objective's settings with the model's own values where they are left to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import ObjectiveConfig
from ..family import Family


def settled(config: ObjectiveConfig, family: Family) -> ObjectiveConfig:
    """Return the settings with the family's levels, shift, space and guidance in place of "auto", a shift of
    0 and a guidance of -1.

    A shift that was set by hand is adapted to the size only if `resolution_shift` was set by hand too. The
    timesteps of "schedule" are the model's own, shifted already, so the family's shift is not added.
    """
    rule: Any = config.resolution_shift
    shift = config.shift
    if rule == "auto" and config.sigmas == "schedule":
        rule, shift = "none", shift or 1.0
    elif rule == "auto":
        rule = "none" if shift else family.resolution_shift
    return replace(
        config,
        sigmas=family.sigmas if config.sigmas == "auto" else config.sigmas,
        shift=shift or family.shift,
        resolution_shift=rule,
        space=family.space if config.space == "auto" else config.space,
        guidance=config.guidance if config.guidance >= 0 or family.guidance is None else family.guidance,
    )
