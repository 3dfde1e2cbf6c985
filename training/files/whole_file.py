"""Files that are complete or absent: written under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .leftovers import is_left_over, owned

TEMPORARY = ".writing-"
"""Prefix of files that are incomplete, or were replaced and could not be removed."""
WINDOWS = os.name == "nt"
"""On Windows, a file that another program has open cannot be replaced."""
HELD_SECONDS = 2.0
"""Seconds to wait for a file that is in use: virus scanners and OneDrive hold one for milliseconds."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path to write to; on exit without an error, the file there is renamed to `path`."""
    with temporary_in(path.parent) as temporary:
        yield temporary
        commit(temporary, path)


@contextmanager
def temporary_in(folder: Path) -> Iterator[Path]:
    """Yield a temporary path in `folder`; a file still there on exit is removed."""
    temporary = folder / _temporary_name()
    try:
        yield temporary
    finally:
        with suppress(OSError):  # the folder is a file, or gone
            temporary.unlink(missing_ok=True)


def commit(temporary: Path, path: Path) -> None:
    """Rename a written file, and return once contents and name are on disk."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    _replace(temporary, path)
    if hasattr(os, "O_DIRECTORY"):  # elsewhere (Windows) a folder cannot be opened, nor need it be
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # some network drives cannot
                os.fsync(folder)
        finally:
            os.close(folder)


def _replace(temporary: Path, path: Path) -> None:
    """Rename a file over an existing one. On Windows, a file mapped into memory, as a stock Load LoRA leaves
    one, cannot be replaced: it is moved aside, and `remove_leftovers` removes it later.
    """
    until = time.monotonic() + HELD_SECONDS
    while True:
        try:
            os.replace(temporary, path)
            return
        except PermissionError:
            if not WINDOWS:
                raise
            if time.monotonic() < until:
                time.sleep(0.05)
            elif path.is_file() and os.access(path, os.W_OK):  # neither a folder nor read-only
                break
            else:
                raise
    aside = path.with_name(_temporary_name())
    os.rename(path, aside)
    try:
        os.replace(temporary, path)
    except OSError:
        os.rename(aside, path)
        raise
    with suppress(OSError):
        aside.unlink()


def _temporary_name() -> str:
    return f"{owned(TEMPORARY)}{uuid.uuid4().hex}"


def remove_leftovers(folder: Path, *, hours: float = 0.0) -> None:
    """Remove incomplete files of killed processes from `folder`: at once if the process has ended for
    certain, otherwise after so many hours."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            old = path.stat().st_mtime <= time.time() - 3600 * hours
            if not hours or old or is_left_over(path.name, TEMPORARY):
                path.unlink()
