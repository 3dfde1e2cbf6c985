"""Space for one more checkpoint, held on the disk while a run trains.

A disk may become full within a step. Whoever filled it cannot take what is held here, and the last step can
still be saved.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO

BLOCK = 1 << 20


class Reserve:
    """Holds space by a file without a name, which goes with the process however that ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file: IO[bytes] | None = None
        self.size = 0
        """Bytes that are held."""

    def hold(self, size: int) -> None:
        """Hold at least `size` bytes, or none where the disk has not so many."""
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
        """Give the space back and return how much that was."""
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
