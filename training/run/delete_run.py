"""Deleting a run: its whole folder, and never one that is being trained."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from ..files.leftovers import is_left_over, owned
from ..user_error import UserError
from .lock import NAME as LOCK
from .lock import lock_folder
from .run_list import find_runs, size_of

DELETED = ".deleted-"
"""Prefix of folders that are about to be gone."""


def delete_run(root: Path, run: str) -> int:
    """Delete the run in `root`/`run` and return how many bytes that freed.

    Raises UserError if there is no such run or it is being trained, OSError if a file cannot be removed.
    """
    folder = next((path for path in find_runs(root) if path.relative_to(root).as_posix() == run), None)
    if folder is None:
        raise UserError(f"{run}: there is no such run in {root}; look up its name there.")
    size = size_of(folder)
    _remove_leftovers(folder.parent)
    gone = folder.with_name(f"{owned(DELETED)}{uuid.uuid4().hex}")
    with lock_folder(folder):
        try:
            folder.rename(gone)  # at once: nobody finds a half of it
        except PermissionError:  # Windows renames no folder with an open file, such as the lock
            gone = folder
        for path in gone.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(gone)
    return size


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of runs that they were deleting."""
    for path in folder.glob(f"{DELETED}*"):
        if is_left_over(path.name, DELETED):
            shutil.rmtree(path, ignore_errors=True)
