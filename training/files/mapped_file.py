"""A safetensors file in memory as the system maps it: pages are read when they are used, and may be dropped.

The mapping is private: what is written to a tensor stays in this process and never reaches the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from ..user_error import UserError
from .tensor_file import FORMATS, TensorFile

Stamp = tuple[int, int, int]


class MappedFile:
    """The tensors of one file, over its mapping."""

    def __init__(self, file: TensorFile) -> None:
        """Map a file whose header was checked. Raises OSError if the system refuses."""
        self.path = file.path
        self.metadata = file.metadata
        with self.path.open("rb") as opened:
            self._stamp = _stamp(os.fstat(opened.fileno()))
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.tensors: Mapping[str, Tensor] = {name: self._tensor(file, name) for name in file.entries}

    def _tensor(self, file: TensorFile, name: str) -> Tensor:
        entry = file.entries[name]
        dtype = getattr(torch, FORMATS[entry.format][1])
        piece = self._bytes[entry.start : entry.start + entry.size]
        aligned = piece if entry.start % dtype.itemsize == 0 else piece.clone()
        return aligned.view(dtype).reshape(entry.shape)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in this mapping."""
        return 0 <= tensor.data_ptr() - self._bytes.data_ptr() < len(self._bytes)

    def require_unchanged(self) -> None:
        """Raise UserError if the file is no longer the one that was mapped."""
        try:
            same = _stamp(os.stat(self.path)) == self._stamp
        except OSError:
            same = False
        if not same:
            raise UserError(
                f"{self.path.name}: the file was changed or removed while the run reads its weights from it "
                "(base 'stream'). Put the same file back or load the base again, then queue again: the run "
                "goes on from its last checkpoint."
            )

    def drop(self, tensor: Tensor) -> None:
        """Let the system take the pages of a tensor in this mapping; its next use reads them again.

        Systems without `madvise` keep them until memory is short.
        """
        if not hasattr(self._map, "madvise") or not tensor.numel():
            return
        first = tensor.data_ptr() - self._bytes.data_ptr()
        start = first - first % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, first + tensor.nbytes - start)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ino
