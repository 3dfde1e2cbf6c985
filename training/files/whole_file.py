"""Files that are whole or not there: written under a temporary name beside their own, then renamed."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .leftovers import is_left_over, owned

TEMPORARY = ".writing-"
"""How the names of files begin that are not whole yet, or have been replaced and could not be removed."""
WINDOWS = os.name == "nt"
"""A file that a program has open cannot be replaced there."""
HELD_SECONDS = 2.0
"""How long a file is waited for: virus scanners and OneDrive hold one for milliseconds."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path to write to; left without an error, the file there gets the name `path`."""
    with temporary_in(path.parent) as temporary:
        yield temporary
        commit(temporary, path)


@contextmanager
def temporary_in(folder: Path) -> Iterator[Path]:
    """Yield a path in `folder`, and remove what is still there in the end."""
    temporary = folder / _temporary_name()
    try:
        yield temporary
    finally:
        with suppress(OSError):  # the folder is a file, or gone
            temporary.unlink(missing_ok=True)


def commit(temporary: Path, path: Path) -> None:
    """Give a written file its name, once its contents and then the name itself are on the disk."""
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
    """Give a file its name. On Windows one that is mapped into memory, as what a stock Load LoRA has read is,
    cannot be replaced, but moved aside; `remove_leftovers` removes it once it can.
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
            elif path.is_file() and os.access(path, os.W_OK):  # no folder, nor a file marked read-only
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
    """Remove what killed processes left half-written in `folder`: at once where the process is known to have
    ended, otherwise after so many hours."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            old = path.stat().st_mtime <= time.time() - 3600 * hours
            if not hours or old or is_left_over(path.name, TEMPORARY):
                path.unlink()
