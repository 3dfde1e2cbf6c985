"""Temporary files and folders whose names say which process made them.

So what a killed process left can be removed at once, and what a living one is writing stays.
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
"""How the temporary folders begin by which a server and the processes that train for it exchange files, and
those of these processes."""

HOST = hashlib.blake2b(platform.node().encode("utf-8", "replace"), digest_size=3).hexdigest()
"""Of this computer: others may write into the same folder over a network, and have process numbers too."""


def owned(prefix: str) -> str:
    """Return how a name begins that this process gives."""
    return f"{prefix}{HOST}-{os.getpid()}-"


def is_left_over(name: str, prefix: str) -> bool:
    """Return whether a process of this computer that has ended gave `name`, which begins with `prefix`."""
    match = re.match(rf"{re.escape(prefix)}{HOST}-([0-9]{{1,9}})-", name)
    return match is not None and not is_alive(int(match[1]))


def is_alive(process: int) -> bool:
    """Return whether the process of this number is running, True where nobody can tell."""
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
    """Yield a temporary folder of this process; those that others have left go first."""
    remove_folders(prefix)
    with tempfile.TemporaryDirectory(prefix=owned(prefix), ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def remove_folders(prefix: str) -> None:
    """Remove the temporary folders of this `prefix` whose processes have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if is_left_over(folder.name, prefix):
            shutil.rmtree(folder, ignore_errors=True)
