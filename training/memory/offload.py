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


class StreamCopier:
    """Copies on a stream of its own; for CUDA, ROCm and XPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream(device)

    def begin(self, host: Tensor) -> Any:
        with self.module.stream(self.stream):
            copy = host.to(self.device, non_blocking=True)
            event = self.module.Event()
            event.record(self.stream)
        return copy, event

    def finish(self, ticket: Any) -> Tensor:
        copy, event = ticket
        current = self.module.current_stream(self.device)
        current.wait_event(event)
        copy.record_stream(current)  # or its memory might be reused while a kernel still reads it
        return copy  # type: ignore[no-any-return]


class Ring:
    """Host tensors that are on the device when they are asked for, if they are asked for in a known order.

    Remembers what followed each pair of fetches: a pair tells the forward pass from the backward pass, which
    goes the other way.
    """

    def __init__(self, copier: Copier, ahead: int) -> None:
        self.copier = copier
        self.ahead = ahead
        """Bytes that may be on their way before they are asked for."""
        self.host: dict[Hashable, Tensor] = {}
        self.follows: dict[tuple[Hashable, Hashable], Hashable] = {}
        self.on_the_way: dict[Hashable, Any] = {}
        self.before: tuple[Hashable, Hashable] = (None, None)

    def add(self, key: Hashable, host: Tensor) -> None:
        """Hold `host` under a key of its own."""
        self.host[key] = host

    def fetch(self, key: Hashable) -> Tensor:
        """Return the tensor on the device, and start copying what came after it before."""
        ticket = self.on_the_way.pop(key, None)
        if ticket is None:
            self.on_the_way.clear()  # the order is another one
            ticket = self.copier.begin(self.host[key])
        self.follows[self.before] = key
        self.before = (self.before[1], key)
        self._look_ahead()
        return self.copier.finish(ticket)

    def _look_ahead(self) -> None:
        pair, room = self.before, self.ahead
        for _ in range(len(self.host)):
            key = self.follows.get(pair)
            room -= self.host[key].nbytes if key is not None else 0
            if key is None or room < 0:
                return
            if key not in self.on_the_way:
                self.on_the_way[key] = self.copier.begin(self.host[key])
            pair = (pair[1], key)


def has_streams(device: torch.device) -> bool:
    """Say whether copies to `device` can run beside its computation."""
    return device.type in ("cuda", "xpu")


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host copy that `device` can read while it computes; the tensor itself where there is none."""
    return tensor.cpu().pin_memory() if has_streams(device) else tensor


@contextmanager
def inputs_on_host(inputs: Iterable[Any]) -> Iterator[None]:
    """Let autograd keep those of `inputs` that carry gradients in host memory, of what it saves in here.

    Copies are ordered by the device's own stream, so nobody waits for them. Inputs without a gradient (text,
    positions) are the same for every block and stay; so does what is in host memory already.
    """
    tensors = [t for t in inputs if isinstance(t, Tensor) and t.device.type != "cpu" and is_worth_moving(t)]
    moved = {t.untyped_storage().data_ptr(): t for t in tensors}

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() not in moved:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_streams(tensor.device))
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        device, host = saved
        return host.to(device, non_blocking=True)  # type: ignore[no-any-return]

    with saved_tensors_hooks(pack, unpack):
        yield


def is_worth_moving(tensor: Tensor) -> bool:
    """Say whether a block's input waits in host memory, where that is another memory."""
    return tensor.requires_grad and tensor.nbytes >= SMALLEST_INPUT
