"""Gradient checkpointing: recompute a block's activations in the backward pass instead of keeping them.

Chen et al. 2016, arXiv:1604.06174. The gradients are the same to the bit in every mode; what differs is how
much is kept and how much is computed twice:

- "none" keeps everything,
- "selective" keeps a block's input, its attention and what its layers make, and recomputes the rest (norms,
  modulation, activations, the wide half of an MLP), which is cheap to compute and expensive to keep,
- "block" keeps a block's input and recomputes all of it,
- "block-offload" does the same and keeps the input in host memory.

No state of random number generators is kept: networks draw nothing in training, and adapters draw by key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..family import block_of
from ..network.replace_forward import set_forward
from ..network.replay import SavedActivations, replay_attention
from ..user_error import UserError
from .in_place import copy_inputs, guard_saved_tensors
from .offload import offload_inputs

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@contextmanager
def checkpoint_blocks(
    network: nn.Module, blocks: tuple[str, ...], mode: str, *, copies: bool = False
) -> Iterator[None]:
    """Checkpoint every block of `network` whose path matches a glob in `blocks`, in one of `MODES`.

    With `copies`, the network may change in place what autograd keeps; else that is an error in every mode.
    "auto" keeps everything: whoever knows how much memory there is chooses (`memory.plan`). The blocks'
    forwards are as before on every exit. Raises UserError for an unknown mode.
    """
    if mode not in ("auto", *MODES):
        raise UserError(f"checkpointing: {mode!r} is unknown; choose one of auto, {', '.join(MODES)}.")
    recompute = MODES.get(mode)
    with ExitStack() as undo:
        undo.enter_context(guard_saved_tensors(copies=copies))
        for block in repeated_blocks(network, blocks).values():
            if copies:
                undo.callback(set_forward(block, copy_inputs(block.forward)))
            if recompute is not None:
                undo.callback(set_forward(block, partial(recompute, block.forward)))
        if recompute is _selective:
            undo.enter_context(replay_attention())
        yield


def repeated_blocks(network: nn.Module, blocks: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the blocks by path, in the order they were built in: "joint_blocks.*" matches by segments."""
    return {path: module for path, module in network.named_modules() if is_block(path, blocks)}


def is_block(path: str, blocks: tuple[str, ...]) -> bool:
    """Return whether a module path is a block's own."""
    return block_of(path, blocks) == path


def _block(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _checkpoint(forward, args, kwargs)


def _block_offload(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with offload_inputs((*args, *kwargs.values())):
        return _checkpoint(forward, args, kwargs)


def _selective(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _checkpoint(forward, args, kwargs, context_fn=_selective_contexts)


def _checkpoint(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], **options: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    inputs = (*args, *kwargs.values())  # in a closure they would not be released
    call = partial(_call, forward, tuple(kwargs))
    return checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def _call(forward: Callable[..., Any], names: tuple[str, ...], *inputs: Any) -> Any:
    first = len(inputs) - len(names)
    return forward(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))


def _selective_contexts() -> Contexts:
    saved = SavedActivations()
    return saved.record(), saved.replay()


MODES: Mapping[str, Callable[..., Any] | None] = {
    "none": None,
    "selective": _selective,
    "block": _block,
    "block-offload": _block_offload,
}
"""How a block computes in each mode, given its own forward; from most kept to least."""
