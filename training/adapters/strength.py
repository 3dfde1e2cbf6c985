"""The strength of all attached adapters: 1 outside `at_strength`, 0 for the base alone, -1 for the opposite.

At strength s a layer computes base + s * (adapted - base), as ComfyUI's loader applies a LoRA at strength s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_current = 1.0
# A plain variable, as in `dropout.py`: blocks are recomputed in the backward pass's own thread.


@contextmanager
def at_strength(strength: float) -> Iterator[None]:
    """Let adapters compute at a strength; use it around the forward and the backward pass."""
    global _current
    before, _current = _current, strength
    try:
        yield
    finally:
        _current = before


def apply_strength(
    adapted: Callable[[Tensor], Tensor], base: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Return a layer's output at the current strength: exactly `base(x)` at 0 and `adapted(x)` at 1."""
    if _current == 1:
        return adapted(x)
    y = base(x)
    return y if _current == 0 else torch.lerp(y, adapted(x), _current)
