"""torch.compile of the repeated blocks, one at a time.

Kernels are fused inside a block; its surroundings (checkpointing, offload of its input, ComfyUI's patches)
stay as they are. Compiled code rounds differently, so it is a setting and never chosen automatically.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..frozen_base.frozen_layer import FrozenLayer
from ..frozen_base.replace_forward import set_forward
from ..model import HeldBase
from .activation_checkpointing import repeated_blocks

BACKEND = "inductor"
"""Backend of torch.compile; needs a C++ compiler on the CPU and Triton on CUDA."""
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")
"""Modules whose exceptions mean that compiling failed."""


class Compiled:
    """The compiled blocks of one network, used every time it is held.

    Dynamo drops compiled code when the functions that it traced are freed. So each module gets the same
    function every time, and its layer borrows the weight of the current hold.
    """

    def __init__(self) -> None:
        self._forwards: dict[str, tuple[Callable[..., Any], FrozenLayer | None]] = {}
        """Module path -> the forward that replaces its class's, and its layer."""
        self._blocks: dict[str, Callable[..., Any]] = {}
        """Path -> compiled forward."""

    @contextmanager
    def compile_blocks(self, base: HeldBase, blocks: tuple[str, ...]) -> Iterator[None]:
        """Compile every block whose path matches a glob in `blocks`, at its first use.

        Enter it with the adapters attached, the same ones each time. Raises RuntimeError if this Python or
        system cannot compile; `is_compile_error` recognizes that and later failures.
        """
        layers = {layer.module: layer for layer in base.layers.values()}
        with ExitStack() as undo:
            for path, module in base.module.named_modules():
                if "forward" in vars(module):
                    forward, layer = self._forwards.setdefault(path, (module.forward, layers.get(module)))
                    undo.callback(set_forward(module, forward))
                    if layer is not None:
                        undo.callback(layer.lend_weight(layers[module]))
            for path, block in repeated_blocks(base.module, blocks).items():
                if path not in self._blocks:
                    self._blocks[path] = torch.compile(_with_own_code(block.forward), backend=BACKEND)
                undo.callback(set_forward(block, self._blocks[path]))
            yield


def is_compile_error(error: BaseException) -> bool:
    """Return whether compiling failed, not the compiled code."""
    origins = [type(cause).__module__ for cause in _chain(error)]
    return "torch.compile" in str(error) or any(name.startswith(COMPILER) for name in origins)


def _with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` as a function of its own code object.

    torch caches compiled code by code object and gives up after a few variants; blocks of a class share one.
    """

    def compute(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    compute.__code__ = compute.__code__.replace()
    return compute


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
