"""Temporary files and folders with the process number in their names.

So leftovers of a killed process can be removed at once, while files of a running one stay.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOR_WORKERS, OF_WORKERS = "graft-gpus-", "graft-worker-"
"""Prefixes of temporary folders: those where a server exchanges files with its training processes, and those
of the processes themselves."""

HOST = hashlib.blake2b(platform.node().encode("utf-8", "replace"), digest_size=3).hexdigest()
"""Digest of this computer's name; other computers on a network may write into the same folder."""


def owned(prefix: str) -> str:
    """Return `prefix` with the computer and number of this process, for names of temporary files."""
    return f"{prefix}{HOST}-{os.getpid()}-"


def is_left_over(name: str, prefix: str) -> bool:
    """Return whether `name` begins with `prefix` and comes from an ended process of this computer."""
    match = re.match(rf"{re.escape(prefix)}{HOST}-([0-9]{{1,9}})-", name)
    return match is not None and not is_alive(int(match[1]))


def is_alive(process: int) -> bool:
    """Return whether this process number is running; True if unknown."""
    try:
        import psutil  # type: ignore[import-untyped]  # comes with ComfyUI
    except ImportError:
        return True
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a temporary folder of this process, after removing leftovers of others."""
    remove_folders(prefix)
    with tempfile.TemporaryDirectory(prefix=owned(prefix), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def remove_folders(prefix: str) -> None:
    """Remove the temporary folders with this `prefix` whose processes have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if is_left_over(folder.name, prefix):
            shutil.rmtree(folder, ignore_errors=True)
