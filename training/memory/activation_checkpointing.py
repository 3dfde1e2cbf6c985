"""Gradient checkpointing: recompute a block's activations in the backward pass instead of saving them.

Chen et al. 2016, arXiv:1604.06174. Gradients are the same to the bit in every mode; the modes differ in what
is saved and what is computed twice:

- "none" saves everything,
- "selective" saves a block's input, its attention and most outputs of its layers, and recomputes the rest
  (norms, modulation, activations, the wide half of an MLP), which is cheap to compute and large to save,
- "block" saves a block's input and recomputes the whole block,
- "block-offload" does the same, with the input in host memory.

No state of a random number generator is saved: networks draw nothing in training, and adapters draw by key.
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
from ..frozen_base.replace_forward import set_forward
from ..frozen_base.saved_activations import SavedActivations, replay_attention
from ..user_error import UserError
from .in_place import copy_inputs, guard_saved_tensors
from .offload import offload_inputs

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@contextmanager
def checkpoint_blocks(
    network: nn.Module, blocks: tuple[str, ...], mode: str, *, copies: bool = False
) -> Iterator[None]:
    """Checkpoint every block of `network` whose path matches a glob in `blocks`, in one of `MODES`.

    With `copies`, the network may change saved tensors in place; otherwise that is an error in every mode.
    "auto" saves everything; `memory.plan` chooses a mode before. Every exit restores the blocks' forwards.
    Raises UserError for an unknown mode.
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
    """Return path -> block in the network's order; a glob such as "joint_blocks.*" matches by segments."""
    return {path: module for path, module in network.named_modules() if is_block(path, blocks)}


def is_block(path: str, blocks: tuple[str, ...]) -> bool:
    """Return whether a module path is that of a block itself."""
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
"""Mode -> how a block computes, given its own forward; from most saved to least."""
