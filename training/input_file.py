"""Files of other people, whatever lies under their names: opening them does not wait, reading them ends."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any


def require_ordinary(path: Path) -> None:
    """Raise OSError for a pipe, a socket or a device: to open one may wait for ever, and Cancel waits too."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError("it is a pipe, a socket or a device, not a file")


def parse_json(text: str | bytes) -> Any:
    """Return a JSON value. Raises ValueError for what is none, or nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists lie too deep within one another") from None
