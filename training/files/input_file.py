"""Files from other people, of any kind: opening never blocks, and reading always ends."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from ..user_error import FileError, UserError

NO_FILE = "it is a pipe, a socket or a device, not a file"


def is_ordinary(path: Path) -> bool:
    """Return whether a path is a file or a folder: opening anything else may block for ever, past Cancel."""
    mode = path.stat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def require_ordinary(path: Path) -> None:
    """Raise FileError for what is not ordinary."""
    if not is_ordinary(path):
        raise FileError(NO_FILE)


def parse_json(text: str | bytes) -> Any:
    """Return a JSON value. Raises UserError for invalid JSON, or if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError("its lists lie too deep within one another") from None
    except ValueError as error:  # of the syntax, or of bytes that are not UTF-8
        raise UserError(str(error)) from error
