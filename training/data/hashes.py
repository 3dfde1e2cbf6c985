"""Digests of files' contents, remembered by path, size, date and inode, so that no file is read twice.

The one rule: a remembered digest counts only if all of these match and the date was not so recent that a
second edit could have the same one (the "racy git" problem, git's Documentation/technical/racy-git.txt).
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ..files.input_file import require_ordinary
from ..log import log

_RACY_NS = 3_000_000_000  # FAT keeps dates to two seconds


Check = Callable[[], None]
"""Called now and then; may raise to cancel."""


def go_on() -> None:
    """Cancel nothing."""


def file_digest(path: Path, check: Check = go_on) -> bytes:
    """Return the 16-byte digest of a file's content.

    Raises OSError if it cannot be read.
    """
    require_ordinary(path)
    state = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            check()
            state.update(block)
    return state.digest()


class ContentHashes:
    """Context manager for a small SQLite file; if that cannot be used, files are read each time."""

    def __init__(
        self, folder: Path, name: str = "content", digest: Callable[[Path, Check], bytes] = file_digest
    ) -> None:
        """Remember the results of `digest` in <folder>/<name>.sqlite."""
        self._file = folder / f"{name}.sqlite"
        self._digest = digest
        self._known: sqlite3.Connection | None = None

    def __enter__(self) -> ContentHashes:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._known = self._connect()
            except sqlite3.OperationalError:
                raise  # locked or not writable: leave it alone
            except sqlite3.DatabaseError:  # not a database any more
                self._file.unlink()
                self._known = self._connect()
        except (sqlite3.Error, OSError) as error:
            self._forget(error)
        return self

    def _connect(self) -> sqlite3.Connection:
        # Each row is its own transaction, so other runs never wait. Losing the last rows in a power cut only
        # means reading those files again, so there is no need to wait for the disk.
        connection = sqlite3.connect(self._file, timeout=30, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS files (path BLOB PRIMARY KEY, stamp TEXT, digest BLOB)"
            )
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._known is not None:
            self._known.close()
            self._known = None

    def of(self, path: Path, check: Check = go_on) -> bytes:
        """Return a file's digest, remembered or computed. Raises OSError if it cannot be read."""
        info = path.stat()
        name = os.fsencode(os.path.abspath(path))
        stamp = f"{info.st_size}:{info.st_mtime_ns}:{info.st_ino}"
        if (digest := self._recall(name, stamp)) is not None:
            return digest
        digest = self._digest(path, check)
        if time.time_ns() - info.st_mtime_ns > _RACY_NS:
            self._remember(name, stamp, digest)
        return digest

    def _recall(self, name: bytes, stamp: str) -> bytes | None:
        if self._known is None:
            return None
        try:
            row = self._known.execute("SELECT stamp, digest FROM files WHERE path = ?", (name,)).fetchone()
        except sqlite3.Error as error:
            self._forget(error)
            return None
        return bytes(row[1]) if row and row[0] == stamp else None

    def _remember(self, name: bytes, stamp: str, digest: bytes) -> None:
        if self._known is None:
            return
        try:
            self._known.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (name, stamp, digest))
        except sqlite3.Error as error:
            self._forget(error)

    def _forget(self, error: Exception) -> None:
        log.warning("%s cannot be used (%s); files are read again instead.", self._file, error)
        if self._known is not None:
            self._known.close()
        self._known = None
