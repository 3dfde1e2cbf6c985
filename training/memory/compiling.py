"""torch.compile of the repeated blocks, one at a time: kernels are fused inside a block, and what surrounds
it (checkpointing, offload of its input, ComfyUI's own patches) stays as it is.

Compiled code rounds differently, so it is a setting and never chosen by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..forward import set_forward
from .checkpointing import repeated_blocks

BACKEND = "inductor"
"""Of torch.compile; it needs a C++ compiler on the CPU and Triton on CUDA."""
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")
"""Modules whose exceptions are about compiling."""


@contextmanager
def compiled(network: nn.Module, blocks: tuple[str, ...]) -> Iterator[None]:
    """Compile every block of `network` whose path matches a glob in `blocks`, when it is first used.

    Raises RuntimeError where this Python or system cannot; that and what fails later is `is_compile_error`.
    """
    with ExitStack() as undo:
        for block in repeated_blocks(network, blocks).values():
            undo.callback(set_forward(block, torch.compile(_with_own_code(block.forward), backend=BACKEND)))
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
