"""Offloading to host memory: frozen weights until they are used, block inputs until the backward pass.

Weights are copied to the device and never back, as nothing changes them. The ring copies on a stream of its
own, about one block ahead of the computation, in the order of earlier steps. On devices without streams, and
on the CPU, a fetch is a plain `Tensor.to`.
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
"""Bytes; smaller inputs of a block stay on the device."""


class Copier(Protocol):
    """Copies host tensors to a device, possibly beside its computation."""

    def begin(self, host: Tensor) -> Any:
        """Start a copy and return a ticket for it."""
        ...

    def finish(self, ticket: Any) -> Tensor:
        """Return the copy, ready for use."""
        ...

    def wait(self) -> None:
        """Wait for all copies."""
        ...


class StreamCopier:
    """Copies on a stream of its own; for CUDA, ROCm and XPU.

    A copy begins when the device has finished all work queued before it. So it can take the memory of weights
    used earlier, and the program, which runs ahead of the device, uses no more than the ring allows.
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
        """Wait for all copies."""
        self.stream.synchronize()


class Ring:
    """Prefetches host tensors to the device, in the order in which they were fetched before.

    The ring remembers the fetch that followed each pair of fetches. A pair tells the forward direction from
    the backward one; a recomputed block differs from its first pass by the pass (forward or backward) of the
    fetch.
    """

    def __init__(self, copier: Copier, ahead: int) -> None:
        self.copier = copier
        self.ahead = ahead
        """Bytes that may be prefetched."""
        self.host: dict[Hashable, Tensor] = {}
        self.follows: dict[tuple[Hashable, Hashable], tuple[Hashable, bool]] = {}
        """Two fetches -> the next one: its key, and whether it is in a backward pass."""
        self.on_the_way: dict[Hashable, Any] = {}
        self.before: tuple[Hashable, Hashable] = (None, None)

    def add(self, key: Hashable, host: Tensor) -> None:
        """Add a host tensor under its own key."""
        self.host[key] = host

    def clear(self) -> None:
        """Drop all tensors."""
        self.copier.wait()
        self.on_the_way.clear()
        self.host.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def fetch(self, key: Hashable) -> Tensor:
        """Return the tensor on the device, and start copying those that followed it before."""
        ticket = self.on_the_way.pop(key, None)
        # Not prefetched: the order has changed, so the other copies on their way are not needed next either.
        if ticket is None:
            self.on_the_way.clear()
            ticket = self.copier.begin(self.host[key])
        # Learn from every fetch: if the order changes, the next step already prefetches in the new one.
        this = (key, in_backward_pass())
        self.follows[self.before] = this
        self.before = (self.before[1], this)
        # Start the next copies before waiting for this one, so that the stream is never idle.
        self._prefetch()
        return self.copier.finish(ticket)

    def _prefetch(self) -> None:
        """Start copying the tensors that followed the last two fetches before, up to `ahead` bytes."""
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
    """Return whether this is a backward pass; torch's own checkpointing asks in the same way."""
    return torch._C._current_graph_task_id() != -1


def has_streams(device: torch.device) -> bool:
    """Return whether copies to `device` can run beside its computation."""
    return device.type in ("cuda", "xpu")


class PinnedMemory:
    """Pinned host memory, which a device can read while it computes.

    PyTorch rounds every request up to a power of two, so tensors share pieces of that size. When no more than
    `host_reserve` of host memory is free, the rest stays unpinned, and the program waits for every copy of
    it.
    """

    def __init__(self, host_reserve: int = 0) -> None:
        self.host_reserve = HOST_RESERVE + host_reserve
        """Bytes."""
        self.pieces: list[Tensor] = []
        """The unused part of each piece, as bytes."""
        self.weights: dict[str, StoredWeight] = {}
        """Layer -> its pinned weight, for the next hold of the same base."""
        self.taken = 0
        """Bytes."""
        self.is_full = False

    def take(self, tensor: Tensor) -> Tensor:
        """Return a pinned copy of a host tensor, or the tensor itself if no pinned memory is left."""
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
        except (RuntimeError, MemoryError) as error:  # the system may have a limit of its own
            self.is_full = True
            log.warning(
                "only %.1f GiB of the base fit into pinned host memory (%s); copying the rest slows down "
                "every step. Set base to 'fp8' in Memory Settings, which copies nothing, or use an fp8 file, "
                "which copies half.",
                *(self.taken / 2**30, error),
            )
        return not self.is_full

    def is_short(self) -> bool:
        """Return whether less host memory is free than the reserve."""
        free = free_bytes(torch.device("cpu"))
        return free is not None and free < HOST_RESERVE

    def release(self) -> None:
        """Give everything back to the system; its tensors must no longer be in use."""
        self.pieces.clear()
        self.weights.clear()
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()


def pinned_bytes(size: int) -> Tensor:
    """Return (size,) uint8 in pinned memory. Raises RuntimeError if the system refuses."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pinned_size(size: int) -> int:
    """Return how many bytes PyTorch pins for a request of `size`."""
    return 1 << (size - 1).bit_length() if size else 0


PIECE = 1 << 29
"""Bytes of pinned memory requested at once."""

ALIGNMENT = 256
"""Bytes; kernels run best on tensors aligned so."""

HOST_RESERVE = 2 << 30
"""Bytes of host memory that are never pinned: with none free, the system kills programs."""


@contextmanager
def offload_inputs(inputs: Iterable[Any]) -> Iterator[None]:
    """Make autograd save those of `inputs` that need gradients in host memory.

    The device's own stream orders the copies, so the program waits for none. Inputs without a gradient (text,
    positions) are shared by all blocks and stay on the device.
    """
    tensors = [t for t in inputs if isinstance(t, Tensor) and t.device.type != "cpu" and is_worth_moving(t)]
    moved = {t.untyped_storage().data_ptr(): t for t in tensors}

    def to_host(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() not in moved:
            return tensor
        return tensor.device, _host_buffer(tensor).copy_(tensor, non_blocking=True)

    def to_device(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        device, host = saved
        return host.to(device, non_blocking=True)  # type: ignore[no-any-return]

    try:
        with saved_tensors_hooks(to_host, to_device):
            yield
    finally:
        moved.clear()  # autograd keeps `to_host` alive, and it would keep the inputs


def _host_buffer(tensor: Tensor) -> Tensor:
    """Return a buffer for a copy, pinned where the device has streams and the system allows it."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_streams(tensor.device))
    except RuntimeError:
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def is_worth_moving(tensor: Tensor) -> bool:
    """Return whether "block-offload" moves a block's input to host memory."""
    return tensor.requires_grad and tensor.nbytes >= SMALLEST_INPUT
