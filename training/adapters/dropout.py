"""Dropout of an adapter's inputs, of its rank components, or of the whole adapter, in training steps only.

Every mask is a pure function of (seed, micro-batch, layer), so a resumed run drops what an uninterrupted one
would have dropped, and a checkpointed block is recomputed with the same masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import rng
from ..config import AdapterConfig

_current: tuple[int, int] | None = None
# A plain variable: on CUDA the backward pass recomputes checkpointed blocks in a thread of its own, where
# neither a context variable nor a thread-local one would be set.


@contextmanager
def draws(seed: int, index: int) -> Iterator[None]:
    """Draw the dropout of micro-batch `index` of a run; use it around the forward and the backward pass."""
    global _current
    before, _current = _current, (seed, index)
    try:
        yield
    finally:
        _current = before


class Draw:
    """The dropout of one adapter in the current micro-batch: nothing outside `draws`."""

    def __init__(self, config: AdapterConfig, path: str, x: Tensor) -> None:
        self.config, self.path, self.x = config, path, x

    def drops_nothing(self) -> bool:
        """Return whether the adapter computes as it does outside training."""
        config = self.config
        return _current is None or not (config.dropout or config.rank_dropout or config.module_dropout)

    def leaves_out_module(self) -> bool:
        """Return whether the adapter is left out; the others are not scaled up for it (as in sd-scripts)."""
        share = self.config.module_dropout
        return _current is not None and bool(share) and self._uniform("module", 1).item() < share

    def inputs(self) -> Tensor:
        """Return x with a share of its elements 0 and the rest scaled up; token ids are left alone."""
        share = self.config.dropout
        if _current is None or not share or not self.x.is_floating_point():
            return self.x
        # Millions of draws, so on the device: equal on equal devices, which is what an exact resume asks for.
        seed = rng.generator(*_current, "dropout", self.path).initial_seed()
        generator = torch.Generator(self.x.device).manual_seed(seed)
        mask = torch.rand(self.x.shape, generator=generator, device=self.x.device) >= share
        return self.x * mask.to(self.x.dtype) / (1 - share)

    def ranks(self) -> Tensor | None:
        """Return a factor for each rank component (rank,), 0 for those dropped; None where none can be."""
        share = self.config.rank_dropout
        if _current is None or not share:
            return None
        mask = self._uniform("rank", self.config.rank) >= share
        return mask.to(self.x.device, torch.float32, non_blocking=True) / (1 - share)

    def _uniform(self, purpose: str, count: int) -> Tensor:
        assert _current is not None
        return torch.rand(count, generator=rng.generator(*_current, purpose, self.path))
