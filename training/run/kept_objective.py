"""The objective that a run began with, so that one that is resumed goes on with the same noise levels
and guidance.

The run's key holds what was asked for. Where that is "auto", the model's row in `training/family.py` decides,
and a later version of Graft may have another row.
"""

from __future__ import annotations

import json
from dataclasses import replace

from ..config import ObjectiveConfig, from_dict, to_dict
from ..family import Family
from ..log import log
from ..objective.settled import settled
from .folder import Run
from .saved_state import read_object, write_text


def keep_objective(run: Run, asked: ObjectiveConfig, family: Family) -> ObjectiveConfig:
    """Return the settings in the run's folder; where there are none to read, write what the family makes of
    those `asked` for.
    """
    path, now = run.folder / "objective.json", settled(asked, family)
    try:
        kept = from_dict(ObjectiveConfig, read_object(path))
    except FileNotFoundError:
        kept = None
    except (OSError, ValueError) as error:  # UserError is one
        log.warning("%s: %s. Going on with the present defaults of %s.", path, error, family.name)
        kept = None
    if kept is None:
        write_text(path, json.dumps(to_dict(now), indent=1))
        kept = now
    if kept.guidance in (now.guidance, -1.0) or family.guidance is None:  # -1: by an earlier version
        kept, now = (replace(config, guidance=asked.guidance) for config in (kept, now))
    if kept != now:
        log.info("the defaults of %s have changed since this run began; it keeps those of then.", family.name)
    return kept
