"""One process at a time works in a run's folder.

The operating system holds the lock and releases it when a process ends in any way, so none is ever left
behind; the process number in the file is for people.
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
HELD = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
"""What systems say of a lock that another process has; anything else is a drive without locks."""
PLACE = 1 << 20
"""Byte that is locked: behind the text, as Windows lets nobody read a locked byte."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which is made if need be.

    Raises UserError when another run holds it, and OSError when the folder cannot be written.
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
            if error.errno not in HELD:
                log.warning("%s cannot be locked (%s); train it once at a time.", folder, error)
            else:
                raise UserError(
                    f"{folder.name}: this run is being trained already, by process {_owner(folder)}; wait "
                    "for it, or give this one another name or seed."
                ) from error
        try:
            with suppress(OSError):  # a full disk is no reason not to train
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
        file.seek(PLACE)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

    def _unlock(file: IO[str]) -> None:
        file.seek(PLACE)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(file: IO[str]) -> None:
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)
