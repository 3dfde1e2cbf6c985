"""Streaming: frozen weights stay in their file and come to the device one block ahead of the computation.

Host memory holds two pinned buffers and what the system keeps of the file, so a base may be larger than host
memory. On the CPU, weights are used where the system maps them, and the pages of a block are dropped after
its use.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..files.mapped_file import MappedFile
from ..log import log
from .offload import StreamCopier, pinned_bytes

BUFFERS = 2
"""Pinned buffers: one is filled from the file while the device reads the other."""


class StagedCopier(StreamCopier):
    """Copies file -> pinned buffer -> device, in a thread, as the program must not wait for the disk."""

    def __init__(self, device: torch.device, source: FileSource) -> None:
        super().__init__(device)
        self.source = source
        self._thread = ThreadPoolExecutor(1, "graft stream")
        self._buffers: deque[tuple[Tensor, Any]] = deque((torch.empty(0), None) for _ in range(BUFFERS))
        """Each with the event after which it may be filled again."""

    def begin(self, host: Tensor) -> Any:
        before = self.module.Event()
        before.record(self.module.current_stream(self.device))
        return self._thread.submit(self._copy, host, before)

    def finish(self, ticket: Future[tuple[Tensor, Any]]) -> Tensor:
        return super().finish(ticket.result())

    def wait(self) -> None:
        """Wait for all copies; there are none after."""
        self._thread.shutdown()
        super().wait()

    @torch.no_grad()
    def _copy(self, host: Tensor, before: Any) -> tuple[Tensor, Any]:
        buffer, read = self._buffers.popleft()
        if read is not None:
            read.synchronize()
        if len(buffer) < host.nbytes:
            buffer = _make_buffer(host.nbytes)
        filled = buffer[: host.nbytes].view(host.dtype).view(host.shape).copy_(host)
        self.source.drop(host)
        with self.module.stream(self.stream):
            self.stream.wait_event(before)  # work queued before may use the memory that the copy takes
            copy = filled.to(self.device, non_blocking=True)
            after = self.module.Event()
            after.record(self.stream)
        self._buffers.append((buffer, after))
        return copy, after


def _make_buffer(size: int) -> Tensor:
    try:
        return pinned_bytes(size)
    except RuntimeError:  # the system may refuse; copies are slower then
        return torch.empty(size, dtype=torch.uint8)


class FileSource:
    """The file that a base's weights lie in, if they do."""

    def __init__(self, file: MappedFile | None) -> None:
        self.file = file
        self.in_memory = 0
        """Bytes of the blocks' weights that are no part of the file."""
        self._block = ""
        self._used: list[Tensor] = []

    def add(self, weight: Tensor) -> None:
        """Count a weight that is to be streamed."""
        if self.file is None or not self.file.has(weight):
            self.in_memory += weight.nbytes

    def note_use(self, block: str, weight: Tensor) -> None:
        """Note the use of a weight; on another block, drop the pages of the one before."""
        if block != self._block:
            for used in self._used:
                self.drop(used)
            self._block, self._used = block, []
            if self.file is not None:
                self.file.require_unchanged()
        self._used.append(weight)

    def drop(self, weight: Tensor) -> None:
        """Let the system take a weight's pages, if they are the file's."""
        if self.file is not None and self.file.has(weight):
            self.file.drop(weight)

    def warn_of_memory(self) -> None:
        """Say how much of the base is in host memory all the same."""
        if self.in_memory >= 1 << 20:
            log.warning(
                "%.2f GiB of the base are in host memory and not in a mapped .safetensors file, so base "
                "'stream' saves none there. Load the file with Load Base Model, in the file's own dtype.",
                self.in_memory / 2**30,
            )
