"""torch.compile of the repeated blocks, one at a time: kernels are fused inside a block, and what surrounds
it (checkpointing, offload of its input, ComfyUI's own patches) stays as it is.

Compiled code rounds differently, so it is a setting and never chosen by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..forward import set_forward
from ..layer import FrozenLayer
from ..model import HeldBase
from .checkpointing import repeated_blocks

BACKEND = "inductor"
"""Of torch.compile; it needs a C++ compiler on the CPU and Triton on CUDA."""
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")
"""Modules whose exceptions are about compiling."""


class Compiled:
    """The compiled blocks of one network: they are good for every time that it is held.

    Compiled code is dropped with the objects that it was made for, so a layer is the same object every time.
    """

    def __init__(self) -> None:
        self._layers: dict[str, tuple[FrozenLayer, Callable[..., Any]]] = {}
        """By path: the layer, and what its module computes, with the adapter."""
        self._blocks: dict[str, Callable[..., Any]] = {}
        """By path."""

    @contextmanager
    def compile_blocks(self, base: HeldBase, blocks: tuple[str, ...]) -> Iterator[None]:
        """Compile every block whose path matches a glob in `blocks`, when it is first used.

        To be entered with the adapters attached, always the same. Raises RuntimeError where this Python or
        system cannot; that and what fails later is `is_compile_error`.
        """
        with ExitStack() as undo:
            for path, layer in base.layers.items():
                first, forward = self._layers.setdefault(path, (layer, layer.module.forward))
                undo.callback(first.lend_weight(layer))
                undo.callback(set_forward(layer.module, forward))
            for path, block in repeated_blocks(base.module, blocks).items():
                if path not in self._blocks:
                    self._blocks[path] = torch.compile(_with_own_code(block.forward), backend=BACKEND)
                undo.callback(set_forward(block, self._blocks[path]))
            yield


def is_compile_error(error: BaseException) -> bool:
    """Say whether compiling failed, rather than what was compiled."""
    origins = [type(cause).__module__ for cause in _chain(error)]
    return "torch.compile" in str(error) or any(name.startswith(COMPILER) for name in origins)


def _with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` as a function of its own code object.

    torch keeps what it compiled by code object and gives up after a few variants; blocks share theirs.
    """

    def compute(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    compute.__code__ = compute.__code__.replace()
    return compute


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
