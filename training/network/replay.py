"""Results that a block does not compute again: what selective checkpointing keeps.

The block's first pass notes them in the order in which it computes them, its second pass takes them in that
order. A layer that is not computed again does not fetch its weight either. Compiled blocks keep nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .replace_forward import replaced


class Kept:
    """What one block keeps between its two passes."""

    def __init__(self) -> None:
        self._results: deque[tuple[Tensor, int]] = deque()
        self._is_second_pass = False
        self._noting, self._taking = create_selective_checkpoint_contexts(ATTENTION)  # type: ignore[no-untyped-call]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep what is computed `once`."""
        with _used(self):
            yield

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Do not compute again what was kept."""
        self._is_second_pass = True
        with _used(self):
            yield

    def once(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` does, or did in the first pass unless it was changed in place since."""
        if self._is_second_pass:
            result, version = self._results.popleft()
            return result if result._version == version else compute()
        result = compute()
        self._results.append((result.detach(), result._version))  # both share numbers and version
        return result

    def attention_once(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute`, which autograd sees, does; its kernel does not run in the second pass."""
        with self._taking if self._is_second_pass else self._noting:
            return compute()


def once(compute: Callable[[], Tensor]) -> Tensor:
    """Return what `compute`, which autograd does not see, gives, or gave in the block's first pass."""
    if torch.compiler.is_compiling() or _current is None:
        return compute()
    return _current.once(compute)


@contextmanager
def attention_once() -> Iterator[None]:
    """Let PyTorch's attention be computed once in each block that keeps anything.

    Found by name and not by a mode, which would see, and hold up, every operation of a block.
    """
    attention = F.scaled_dot_product_attention

    def attention_or_kept(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or _current is None:
            return attention(*args, **kwargs)
        return _current.attention_once(lambda: attention(*args, **kwargs))

    with replaced(F, "scaled_dot_product_attention", attention_or_kept):
        yield


def is_worth_keeping(shape: tuple[int, ...]) -> bool:
    """Return whether a product with a weight of `shape` (out, in, *kernel) is.

    An element takes `in` operations for each place in the kernel. A layer that makes four elements or more of
    one, as an MLP's first does, makes half of all that would be kept, and is cheap unless `in` is large.
    """
    outputs, operations = shape[0], math.prod(shape[1:])
    return outputs < 4 * operations or operations >= EXPENSIVE


EXPENSIVE = 3072
"""Operations an element from which on a product is always kept."""


def _operations(*names: str) -> list[Any]:
    """Return the operations of these names that this torch has."""
    aten = torch.ops.aten
    return [getattr(aten, name).default for name in names if hasattr(aten, name)]


ATTENTION = _operations(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)

_current: Kept | None = None
# A plain variable: on CUDA the backward pass recomputes checkpointed blocks in a thread of its own.


@contextmanager
def _used(kept: Kept) -> Iterator[None]:
    global _current
    before, _current = _current, kept
    try:
        yield
    finally:
        _current = before
