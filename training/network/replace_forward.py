"""Replace what a module computes, and put back what was there: the one way the engine changes a network.

A forward set on the instance hides the class's; no hook, wrapper or renamed parameter is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let `module` compute `forward`; return the function that puts back what it computed before.

    Undo in reverse order (an ExitStack does).
    """
    before = module.__dict__.get("forward")
    module.forward = forward

    def restore() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = before

    return restore


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Let a Python module have `value` under `name` for the duration of the context."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
