"""Changes that make ComfyUI's sampling-only networks differentiable for the duration of a run.

ComfyUI's Flux blocks add to their residual stream in place after a norm has saved it for the backward pass.
The code stays ComfyUI's: the readers of the stream get a copy of it, as an out-of-place addition would have
made one, so the forward pass is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...family import FAMILIES, InPlaceBlock
from ...frozen_base.replace_forward import set_forward

TEXT_ENCODER = ("CLIPLayer", InPlaceBlock(("x",), ("layer_norm1", "layer_norm2")))
"""The block of CLIP text encoders, by its class in ComfyUI, as `Family.in_place` has those of networks."""


@contextmanager
def make_differentiable(network: nn.Module) -> Iterator[None]:
    """Make every known block of `network` differentiable; everything is restored on every exit."""
    known = {TEXT_ENCODER, *(block for family in FAMILIES.values() for block in family.in_place.items())}
    with ExitStack() as undo:
        for module in network.modules():
            names = [cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("comfy.")]
            kinds = {block for name, block in known if name in names}
            # A block of this name without these children is another model's.
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
