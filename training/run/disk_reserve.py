"""Disk space for one more checkpoint, reserved while a run trains.

Another program may fill the disk within a step. It cannot take this space, so the last step can still be
saved.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO

BLOCK = 1 << 20


class DiskReserve:
    """Holds space by a file without a name, which disappears with the process however it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file: IO[bytes] | None = None
        self.size = 0
        """Bytes reserved now."""

    def hold(self, size: int) -> None:
        """Reserve at least `size` bytes, or none if the disk has less."""
        if self.size >= size:
            return
        self.release()
        try:
            self.file = tempfile.TemporaryFile(dir=self.folder, buffering=0)
            _fill(self.file, size)
            self.size = size
        except OSError:
            self.release()

    def release(self) -> int:
        """Free the space and return its bytes."""
        released, self.size = self.size, 0
        if self.file is not None:
            self.file.close()
            self.file = None
        return released


def _fill(file: IO[bytes], size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    while size > 0:  # Windows, macOS
        size -= file.write(bytes(min(size, BLOCK)))
