"""The cache on disk: one small .safetensors file per key, shared by all runs with the same folder.

The one rule: a file under its final name is complete. It is written under a temporary name and renamed, so a
killed process leaves at most a temporary file, and two processes can encode the same image.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from ..log import log
from ..user_error import UserError

THUMBNAILS = "thumbnails"
"""Folder of the small pictures that the editor shows (`thumbnail.py`), beside what is encoded."""
CAPTIONS = "captions"
KINDS = ("latents", "masks", "text", THUMBNAILS, CAPTIONS)
_TEMPORARY = ".tmp"
_FILES = (".safetensors", ".jpg", _TEMPORARY)
_DAY = 24 * 3600.0


@dataclass(frozen=True)
class CacheReport:
    """Number and size of files in a cache folder, or of those removed from it."""

    files: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.files} files, {self.bytes / 1e6:.1f} MB"


def note_use(path: str | os.PathLike[str]) -> None:
    """Date a file of the cache to now, once a day: `clean` goes by the last use."""
    if time.time() - os.stat(path).st_mtime > _DAY:
        with suppress(OSError):  # another user's, or a folder that cannot be written
            os.utime(path)


class Store:
    """Tensors by kind and key (16 bytes)."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def path(self, kind: str, key: bytes) -> Path:
        """Return the path of an entry, present or not."""
        return Path(self._path(kind, key))

    def _path(self, kind: str, key: bytes) -> str:
        # In 256 folders, which stay small with a million entries. A string: a Path takes longer than `has`.
        name = key.hex()
        return os.path.join(self.folder, kind, name[:2], f"{name}.safetensors")

    def has(self, kind: str, key: bytes) -> bool:
        """Return whether an entry exists and is complete; a damaged one is logged and counts as missing."""
        path = self._path(kind, key)
        try:
            with safe_open(path, framework="pt"):
                pass
            note_use(path)
        except FileNotFoundError:
            return False
        except (SafetensorError, OSError, ValueError) as error:
            log.warning("Cache entry %s is damaged (%s) and is encoded again.", path, error)
            return False
        return True

    def shapes(self, kind: str, key: bytes) -> list[list[int]]:
        """Return the shapes of an entry's tensors, without reading them; none if it is missing."""
        try:
            with safe_open(self._path(kind, key), framework="pt") as file:
                return [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        except (SafetensorError, OSError, ValueError):
            return []

    def read(self, kind: str, key: bytes) -> dict[str, Tensor]:
        """Return an entry's tensors. Raises UserError if it is missing or damaged."""
        path = self.path(kind, key)
        try:
            tensors: dict[str, Tensor] = load_file(path)
            return tensors
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(
                f"cache entry {path} cannot be read ({error}). Run Encode Dataset with 'encode again' once."
            ) from error

    def write(self, kind: str, key: bytes, tensors: Mapping[str, Tensor]) -> None:
        """Write an entry, complete or not at all. Raises UserError if the folder cannot be written to."""
        path = self.path(kind, key)
        temporary = path.with_name(f"{path.stem}.{uuid.uuid4().hex}{_TEMPORARY}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(
                    save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})
                )
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        except PermissionError:
            # Windows refuses to replace a file that another process is reading: same key, same content.
            if not path.exists():
                raise UserError(
                    f"the cache folder {self.folder} cannot be written to: permission denied. Give ComfyUI's "
                    "user the right to write there."
                ) from None
        except OSError as error:
            raise UserError(
                f"the cache folder {self.folder} cannot be written to ({error.strerror or error}); "
                "free some space, or start ComfyUI with another --output-directory."
            ) from error

    def report(self) -> CacheReport:
        """Return the number and size of all files in the cache."""
        sizes = [entry.stat().st_size for entry in self._files()]
        return CacheReport(len(sizes), sum(sizes))

    def clean(self, *, unused_days: float) -> CacheReport:
        """Remove entries unused for so many days and leftovers of killed runs; return what was removed."""
        files = bytes = 0
        for entry in self._files():
            status = entry.stat()
            limit = min(unused_days, 1.0) if entry.name.endswith(_TEMPORARY) else unused_days
            if time.time() - status.st_mtime >= limit * _DAY:
                os.unlink(entry.path)
                files, bytes = files + 1, bytes + status.st_size
        return CacheReport(files, bytes)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Yield the files of the cache only, even if its folder has other files."""
        for kind in KINDS:
            for parent in sorted((self.folder / kind).glob("[0-9a-f][0-9a-f]")):
                with os.scandir(parent) as entries:
                    yield from (e for e in entries if e.name.endswith(_FILES))
