"""Make networks whose code was written for sampling differentiable, for the duration of a run.

ComfyUI's Flux blocks add to their residual stream in place after a norm has saved it for the backward pass.
The code stays ComfyUI's: the readers of the stream get a copy of it, as an out-of-place addition would have
made one, so the forward pass is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...network.replace_forward import set_forward


@dataclass(frozen=True)
class InPlaceBlock:
    """A kind of block that changes its inputs in place."""

    streams: tuple[str, ...]
    """Arguments that it adds to, in the order of its signature."""
    readers: tuple[str, ...]
    """Children that save a stream for the backward pass while the block still adds to it."""


IN_PLACE: Mapping[str, InPlaceBlock] = {
    "DoubleStreamBlock": InPlaceBlock(("img", "txt"), ("img_norm1", "img_norm2", "txt_norm1", "txt_norm2")),
    "SingleStreamBlock": InPlaceBlock(("x",), ("pre_norm",)),
    "ContextProcessorBlock": InPlaceBlock(("x",), ("norm1", "norm2")),
    "CLIPLayer": InPlaceBlock(("x",), ("layer_norm1", "layer_norm2")),
}
"""By class name in ComfyUI: Flux, Chroma, Flux.2 and Hunyuan share the first two; SD3's context processor;
CLIP text encoders. A block of this name without these children is another model's."""


@contextmanager
def make_differentiable(network: nn.Module) -> Iterator[None]:
    """Make every known block of `network` differentiable; everything is restored on every exit."""
    with ExitStack() as undo:
        for module in network.modules():
            names = [cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("comfy.")]
            kinds = [IN_PLACE[name] for name in names if name in IN_PLACE]
            for kind in (kind for kind in kinds if all(hasattr(module, name) for name in kind.readers)):
                undo.callback(set_forward(module, partial(_with_copies, module.forward, kind.streams)))
                for child in (getattr(module, name) for name in kind.readers):
                    undo.callback(set_forward(child, partial(_reading_a_copy, child.forward)))
        yield


def _with_copies(forward: Callable[..., Any], streams: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Call the block with copies of its streams, as recomputing it later needs them unchanged."""
    if torch.is_grad_enabled():
        args = tuple(arg.clone() if i < len(streams) else arg for i, arg in enumerate(args))
        kwargs = {name: arg.clone() if name in streams else arg for name, arg in kwargs.items()}
    return forward(*args, **kwargs)


def _reading_a_copy(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x.clone() if x.requires_grad else x)
