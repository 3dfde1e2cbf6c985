"""Gradient checkpointing: recompute a block's activations in the backward pass instead of keeping them.

Chen et al. 2016, arXiv:1604.06174. The gradients are the same; one forward pass is paid twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def checkpointed(network: nn.Module, blocks: tuple[str, ...], mode: str) -> Iterator[None]:
    """Checkpoint every block of `network` whose path matches a glob in `blocks`, as `mode` says ("none", "block").

    The blocks' forwards are as before on every exit. Raises ValueError for an unknown mode.
    """
    if mode not in ("auto", "none", "block"):
        raise ValueError(f"checkpointing: {mode!r} is unknown; choose one of auto, none, block.")
    chosen = repeated_blocks(network, blocks) if mode == "block" else []
    before = [block.__dict__.get("forward") for block in chosen]
    try:
        for block in chosen:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield
    finally:
        for block, forward in zip(chosen, before, strict=True):
            if forward is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = forward


def repeated_blocks(network: nn.Module, blocks: tuple[str, ...]) -> list[nn.Module]:
    """Return the blocks in the order they run: modules whose path matches segment by segment ("joint_blocks.*")."""

    def matches(path: str, glob: str) -> bool:
        names, globs = path.split("."), glob.split(".")
        return len(names) == len(globs) and all(map(fnmatchcase, names, globs))

    return [module for path, module in network.named_modules() if any(matches(path, glob) for glob in blocks)]
