"""Gradient checkpointing: recompute a block's activations in the backward pass instead of keeping them.

Chen et al. 2016, arXiv:1604.06174. The gradients are the same to the bit in every mode; what differs is how
much is kept and how much is computed twice:

- "none" keeps everything,
- "selective" keeps a block's input, its attention and its large matrix products, and recomputes the rest
  (norms, modulation, activations, the wide half of an MLP), which is cheap to compute and expensive to keep,
- "block" keeps a block's input and recomputes all of it,
- "block-offload" does the same and keeps the input in host memory.

No state of random number generators is kept: networks draw nothing in training, and adapters draw by key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..adapters.fused import keeping_base_outputs
from ..forward import set_forward
from .offload import inputs_on_host

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@contextmanager
def checkpointed(network: nn.Module, blocks: tuple[str, ...], mode: str) -> Iterator[None]:
    """Checkpoint every block of `network` whose path matches a glob in `blocks`, in one of `MODES`.

    "auto" keeps everything: whoever knows how much memory there is chooses (`memory.plan`). The blocks'
    forwards are as before on every exit. Raises ValueError for an unknown mode.
    """
    if mode not in ("auto", *MODES):
        raise ValueError(f"checkpointing: {mode!r} is unknown; choose one of auto, {', '.join(MODES)}.")
    recompute = MODES.get(mode)
    with ExitStack() as undo:
        if recompute is not None:
            for block in repeated_blocks(network, blocks).values():
                undo.callback(set_forward(block, partial(recompute, block.forward)))
        yield


def repeated_blocks(network: nn.Module, blocks: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the blocks by path, in the order they were built in: "joint_blocks.*" matches by segments."""
    return {path: module for path, module in network.named_modules() if is_block(path, blocks)}


def is_block(path: str, blocks: tuple[str, ...]) -> bool:
    """Say whether a module path is a block's own."""
    return block_of(path, blocks) == path


def block_of(path: str, blocks: tuple[str, ...]) -> str | None:
    """Return the path of the block that a module belongs to, or None."""
    names = path.split(".")
    for glob in (blocks_glob.split(".") for blocks_glob in blocks):
        if len(names) >= len(glob) and all(map(fnmatchcase, names, glob)):
            return ".".join(names[: len(glob)])
    return None


def _block(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    inputs = (*args, *kwargs.values())  # in a closure they would not be released
    call = partial(_call, forward, tuple(kwargs))
    return checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=False)


def _call(forward: Callable[..., Any], names: tuple[str, ...], *inputs: Any) -> Any:
    first = len(inputs) - len(names)
    return forward(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))


def _block_offload(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with inputs_on_host((*args, *kwargs.values())):
        return _block(forward, *args, **kwargs)


def _selective(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with keeping_base_outputs():
        return checkpoint(
            partial(_keeping, forward),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=_selective_contexts,
            **kwargs,
        )


def _keeping(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with keeping_base_outputs():  # here, so that it also holds where the block is computed again
        return forward(*args, **kwargs)


def _selective_contexts() -> Contexts:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return, no-untyped-call]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    weight = MATRIX_PRODUCTS.get(operation)
    keep = operation in ATTENTION or (weight is not None and _is_large(weight(args)))
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _is_large(weight: Tensor) -> bool:
    """Say whether a product with `weight` (in, out) is worth keeping: it takes `in` operations an element.

    So a LoRA's second product, of rank operations an element, is computed again. So is one that makes four
    elements or more of one, as the first layer of an MLP does: half of all that would be kept, and cheap
    where `in` is not large.
    """
    inputs, outputs = weight.shape
    return min(256, outputs) <= inputs and (outputs < 4 * inputs or inputs >= EXPENSIVE)


EXPENSIVE = 3072
"""Operations an element from which on a product is always kept."""


def _operations(*names: str) -> tuple[Any, ...]:
    """Return the operations of these names that this torch has."""
    aten = torch.ops.aten
    return tuple(getattr(aten, name).default for name in names if hasattr(aten, name))


ATTENTION = _operations(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
MATRIX_PRODUCTS: Mapping[Any, Callable[[tuple[Any, ...]], Tensor]] = {
    torch.ops.aten.mm.default: lambda args: args[1],
    torch.ops.aten.addmm.default: lambda args: args[2],
    torch.ops.aten.convolution.default: lambda args: args[1].flatten(1).T,
}
"""Operation -> where its weight is, as (in, out)."""

MODES: Mapping[str, Callable[..., Any] | None] = {
    "none": None,
    "selective": _selective,
    "block": _block,
    "block-offload": _block_offload,
}
"""How a block computes in each mode, given its own forward; from most kept to least."""
