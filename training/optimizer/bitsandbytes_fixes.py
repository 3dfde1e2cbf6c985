"""Two fixes for bitsandbytes' optimizers.

They wait for the device after every parameter, which only paged state needs. And they never free paged state,
so a run reuses what an earlier run left.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..frozen_base.replace_forward import replaced

_unused: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
"""Paged state that no optimizer uses any more, by shape, dtype and device."""


def fix_waits_and_leaks(kind: Any) -> Any:
    """Return a subclass of the optimizer class `kind` with both fixes."""

    class Optimizer(kind):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            module = sys.modules["bitsandbytes.optim.optimizer"]
            waits = self.is_paged or not hasattr(module, "sync_gpu")  # older versions wait once a step
            with nullcontext() if waits else replaced(module, "sync_gpu", lambda tensor: None):
                return super().step(closure)

        def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
            unused = _unused[(p.shape, dtype, p.device)]
            buffer: Tensor = unused.pop().zero_() if unused else super().get_state_buffer(p, dtype)
            if getattr(buffer, "is_paged", False):
                weakref.finalize(self, unused.append, buffer).atexit = False
            return buffer

    return Optimizer
