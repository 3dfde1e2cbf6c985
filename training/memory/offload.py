"""What waits in host memory: frozen weights until they are used, block inputs until the backward pass.

Weights are only ever copied to the device, never back, as nothing changes them. The ring copies on a stream
of its own, about one block ahead of the computation, in the order that it saw before; where a device has
no streams (and on the CPU, where there is nowhere to copy to) a fetch is a plain `Tensor.to`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..log import log
from .device_memory import free_bytes
from .quantize import StoredWeight

SMALLEST_INPUT = 1 << 20
"""Bytes; smaller inputs of a block stay where they are."""


class Copier(Protocol):
    """Copies one host tensor to a device, now or meanwhile."""

    def begin(self, host: Tensor) -> Any:
        """Start a copy and return a ticket for it."""
        ...

    def finish(self, ticket: Any) -> Tensor:
        """Return the copy, ready for use."""
        ...

    def wait(self) -> None:
        """Return when nothing is copied any more."""
        ...


class StreamCopier:
    """Copies on a stream of its own; for CUDA, ROCm and XPU.

    A copy begins when the device has done what it was given so far. So the memory of weights that were used
    is free for it, and the program, which runs ahead of the device, takes no more than the ring allows.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream(device)

    def begin(self, host: Tensor) -> Any:
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            copy = host.to(self.device, non_blocking=True)
            event = self.module.Event()
            event.record(self.stream)
        return copy, event

    def finish(self, ticket: Any) -> Tensor:
        copy, event = ticket
        self.module.current_stream(self.device).wait_event(event)
        return copy  # type: ignore[no-any-return]

    def wait(self) -> None:
        """Return when all copies are done."""
        self.stream.synchronize()


class Ring:
    """Host tensors that are on the device when they are asked for, if they are asked for in a known order.

    Remembers what followed each pair of fetches. Pairs tell computing forwards from backwards; a block that
    is computed again in the backward pass is told from its first time by the pass that a fetch is made in.
    """

    def __init__(self, copier: Copier, ahead: int) -> None:
        self.copier = copier
        self.ahead = ahead
        """Bytes that may be on their way before they are asked for."""
        self.host: dict[Hashable, Tensor] = {}
        self.follows: dict[tuple[Hashable, Hashable], tuple[Hashable, bool]] = {}
        """Two fetches -> the one behind them: its key, and whether it is made in a backward pass."""
        self.on_the_way: dict[Hashable, Any] = {}
        self.before: tuple[Hashable, Hashable] = (None, None)

    def add(self, key: Hashable, host: Tensor) -> None:
        """Hold `host` under a key of its own."""
        self.host[key] = host

    def clear(self) -> None:
        """Let go of all tensors."""
        self.copier.wait()
        self.on_the_way.clear()
        self.host.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def fetch(self, key: Hashable) -> Tensor:
        """Return the tensor on the device, and start copying what came after it before."""
        ticket = self.on_the_way.pop(key, None)
        if ticket is None:
            self.on_the_way.clear()  # the order is another one
            ticket = self.copier.begin(self.host[key])
        this = (key, in_backward_pass())
        self.follows[self.before] = this
        self.before = (self.before[1], this)
        self._look_ahead()
        return self.copier.finish(ticket)

    def _look_ahead(self) -> None:
        pair, left = self.before, self.ahead
        for _ in range(len(self.host)):
            following = self.follows.get(pair)
            if following is None:
                return
            key = following[0]
            left -= self.host[key].nbytes
            if left < 0:
                return
            if key not in self.on_the_way:
                self.on_the_way[key] = self.copier.begin(self.host[key])
            pair = (pair[1], following)


def in_backward_pass() -> bool:
    """Return whether autograd is at work, as torch's own checkpointing asks it."""
    return torch._C._current_graph_task_id() != -1


def has_streams(device: torch.device) -> bool:
    """Return whether copies to `device` can run beside its computation."""
    return device.type in ("cuda", "xpu")


class PinnedMemory:
    """Host memory that a device can read while it computes.

    PyTorch rounds every request up to a power of two, so tensors share pieces of that size. Where the host
    has no more than `host_reserve` of it, they stay where they are, and the program waits for every copy.
    """

    def __init__(self, host_reserve: int = 0) -> None:
        self.host_reserve = HOST_RESERVE + host_reserve
        """Bytes."""
        self.pieces: list[Tensor] = []
        """What is left of each piece, as bytes."""
        self.weights: dict[str, StoredWeight] = {}
        """Layer -> its pinned weight, for the next time the same base is held."""
        self.taken = 0
        """Bytes."""
        self.is_full = False

    def take(self, tensor: Tensor) -> Tensor:
        """Return a pinned copy of a host tensor, or the tensor itself where none is left."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        index = next((i for i, piece in enumerate(self.pieces) if len(piece) >= size), len(self.pieces))
        if index == len(self.pieces) and not self._grow(max(pinned_size(size), PIECE)):
            return tensor
        piece = self.pieces[index]
        self.pieces[index] = piece[size:]
        self.taken += size
        return piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _grow(self, size: int) -> bool:
        if self.is_full:
            return False
        free = free_bytes(torch.device("cpu"))
        try:
            if free is not None and free < size + self.host_reserve:
                raise MemoryError(f"{free / 2**30:.1f} GiB are free")
            self.pieces.append(pinned_bytes(size))
        except (RuntimeError, MemoryError) as error:  # systems set limits of their own
            self.is_full = True
            log.warning(
                "only %.1f GiB of the base fit into pinned host memory (%s); copying the rest holds "
                "every step up. Set base to 'fp8' in Memory Settings, which copies nothing, or use a file in "
                "fp8, which copies half.",
                *(self.taken / 2**30, error),
            )
        return not self.is_full

    def is_short(self) -> bool:
        """Return whether the host has less memory left than is never pinned."""
        free = free_bytes(torch.device("cpu"))
        return free is not None and free < HOST_RESERVE

    def release(self) -> None:
        """Give all of it back to the system; no tensor in it may be in use."""
        self.pieces.clear()
        self.weights.clear()
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()


def pinned_bytes(size: int) -> Tensor:
    """Return (size,) uint8. Raises RuntimeError where the system refuses."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pinned_size(size: int) -> int:
    """Return how many bytes PyTorch takes for so many."""
    return 1 << (size - 1).bit_length() if size else 0


PIECE = 1 << 29
"""Bytes of pinned memory that are asked for at once."""

ALIGNMENT = 256
"""Bytes, as kernels like it."""

HOST_RESERVE = 2 << 30
"""Bytes of host memory that are never pinned: without any, the system ends programs."""


@contextmanager
def offload_inputs(inputs: Iterable[Any]) -> Iterator[None]:
    """Let autograd keep those of `inputs` that carry gradients in host memory, of what it saves in here.

    Copies are ordered by the device's own stream, so nobody waits for them. Inputs without a gradient (text,
    positions) are the same for every block and stay; so does what is in host memory already.
    """
    tensors = [t for t in inputs if isinstance(t, Tensor) and t.device.type != "cpu" and is_worth_moving(t)]
    moved = {t.untyped_storage().data_ptr(): t for t in tensors}

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() not in moved:
            return tensor
        return tensor.device, _host_buffer(tensor).copy_(tensor, non_blocking=True)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        device, host = saved
        return host.to(device, non_blocking=True)  # type: ignore[no-any-return]

    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        moved.clear()  # what is saved keeps `pack`, and with it the inputs themselves


def _host_buffer(tensor: Tensor) -> Tensor:
    """Return a buffer for a copy, pinned where the device has streams and the system allows it."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_streams(tensor.device))
    except RuntimeError:
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def is_worth_moving(tensor: Tensor) -> bool:
    """Return whether a block's input waits in host memory, where that is another memory."""
    return tensor.requires_grad and tensor.nbytes >= SMALLEST_INPUT
