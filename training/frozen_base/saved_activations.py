"""Saved activations: results that a block under selective checkpointing saves instead of recomputing.

The block's first pass records them in the order of its computation; its second pass replays them in that
order. A layer that is replayed does not fetch its weight either. Compiled blocks save nothing.
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


class SavedActivations:
    """The results of one block that are saved between its two passes."""

    def __init__(self) -> None:
        self._results: deque[tuple[Tensor, int]] = deque()
        self._is_second_pass = False
        self._recording, self._replaying = create_selective_checkpoint_contexts(ATTENTION)  # type: ignore[no-untyped-call]

    @contextmanager
    def record(self) -> Iterator[None]:
        """The first pass: save what goes through `compute_once`."""
        with _use(self):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """The second pass: return what was saved instead of computing it again."""
        self._is_second_pass = True
        with _use(self):
            yield

    def compute_once(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of `compute`: saved in the first pass, unless it was changed in place since."""
        if self._is_second_pass:
            result, version = self._results.popleft()
            return result if result._version == version else compute()
        result = compute()
        self._results.append((result.detach(), result._version))  # detach() shares the version too
        return result

    def attend_once(self, compute: Callable[[], Tensor]) -> Tensor:
        """Like `compute_once` for attention, which autograd differentiates: only its kernel is replayed."""
        with self._replaying if self._is_second_pass else self._recording:
            return compute()


def compute_once(compute: Callable[[], Tensor]) -> Tensor:
    """Return the result of `compute`, which needs no gradient, or the one saved in the block's first pass."""
    if torch.compiler.is_compiling() or _current is None:
        return compute()
    return _current.compute_once(compute)


@contextmanager
def replay_attention() -> Iterator[None]:
    """Compute PyTorch's attention once in each block that saves anything.

    The function is replaced by name: a dispatch mode would slow down every other operation of the block.
    """
    attention = F.scaled_dot_product_attention

    def attention_or_saved(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or _current is None:
            return attention(*args, **kwargs)
        return _current.attend_once(lambda: attention(*args, **kwargs))

    with replaced(F, "scaled_dot_product_attention", attention_or_saved):
        yield


def is_worth_saving(shape: tuple[int, ...]) -> bool:
    """Return whether to save a layer's output instead of recomputing it; `shape` is (out, in, *kernel).

    Each output element costs `in` multiplications per place in the kernel. Layers that widen by four or more
    (the first of an MLP) make half of all activations and are cheap to recompute unless `in` is large.
    """
    outputs, operations = shape[0], math.prod(shape[1:])
    return outputs < 4 * operations or operations >= EXPENSIVE


EXPENSIVE = 3072
"""Multiplications per output element from which on an output is always saved."""


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

_current: SavedActivations | None = None
# A plain variable: on CUDA the backward pass recomputes checkpointed blocks in a thread of its own.


@contextmanager
def _use(saved: SavedActivations) -> Iterator[None]:
    global _current
    before, _current = _current, saved
    try:
        yield
    finally:
        _current = before
