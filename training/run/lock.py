"""The lock of a run's folder: only one process at a time trains there.

The operating system holds the lock and releases it however the process ends, so no lock is ever left behind.
The process id in the file is for people.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..log import log
from ..user_error import FileError, UserError

NAME = "lock"
LOCKED = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
"""Errors for a lock that another process holds; any other error means a drive without locks."""
OFFSET = 1 << 20
"""The byte that is locked: after the text, because Windows lets no process read a locked byte."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` during the context; create the folder if it is missing.

    Raises UserError when another run holds the lock, and OSError when the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / NAME).open("a+", encoding="utf-8")
    except OSError as error:
        raise FileError(f"{folder}: no run can be kept here ({error}); make the folder writable.") from error
    with file:
        try:
            _lock(file)
        except OSError as error:
            if error.errno not in LOCKED:
                log.warning("%s cannot be locked (%s); train it in one place at a time.", folder, error)
            else:
                raise UserError(
                    f"{folder.name}: this run is being trained already, by process {_owner(folder)}; wait "
                    "until it ends, or use another name or seed."
                ) from error
        try:
            with suppress(OSError):  # a full disk should not prevent training
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            yield
        finally:
            with suppress(OSError):
                _unlock(file)


def _owner(folder: Path) -> str:
    with suppress(OSError):
        return (folder / NAME).read_text(encoding="utf-8") or "unknown"
    return "unknown"


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[str]) -> None:
        file.seek(OFFSET)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

    def _unlock(file: IO[str]) -> None:
        file.seek(OFFSET)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(file: IO[str]) -> None:
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)
