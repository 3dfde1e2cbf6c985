"""A counter of the bytes of live tensors, now and at the peak, on any device, also the CPU.

Every storage that an operation creates counts from its creation until nothing refers to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
FLOPS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Operation -> its floating-point operations: torch's table, plus the CPU's attention."""


class LiveTensors(TorchDispatchMode):
    """Counts bytes and floating-point operations of everything computed inside the context.

    With a `limit`, an operation that would leave more bytes alive raises torch.OutOfMemoryError.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self.now = 0
        self.peak = 0
        self.flops = 0
        self._known: dict[int, int] = {}
        """Storage -> its bytes; 0 for those created outside."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for tensor in tensors_of((*args, *kwargs.values())):
            self._know(tensor, 0)
        result = function(*args, **kwargs)
        for tensor in tensors_of((result,)):
            self._know(tensor, tensor.untyped_storage().nbytes())
        if self.limit is not None and self.now > self.limit:
            raise torch.OutOfMemoryError(f"{self.now} bytes are in use, {self.limit} are allowed.")
        count = FLOPS.get(function.overloadpacket) if hasattr(function, "overloadpacket") else None
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        return result

    def _know(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, and those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)
