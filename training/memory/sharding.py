"""A base shared out among processes: each holds 1/K of every block's weights, and a block is gathered for its
use, one ahead of the computation.

Weights are sharded as FSDP2 does (Zhao et al. 2023, arXiv:2304.11277), by PyTorch's DTensor, as bytes: so
quantized ones too, and what is gathered is the weight bit for bit. A frozen base has no gradients to reduce.

All processes have to gather the same blocks in the same order. They do, whatever their batches: what is
gathered follows from the order of the blocks and the direction of the pass alone, and each pass begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import distributed
from ..user_error import UserError
from .offload import has_streams, in_backward_pass
from .quantize import Parts, StoredWeight

SHARDED = "sharded"
"""The store's name in Memory Settings."""


def require_processes() -> None:
    """Raise UserError in a process that trains alone."""
    if distributed.world() == 1:
        raise UserError(
            "base 'sharded' needs several processes, which hold the base together, and this one is alone. "
            "Set gpus of Train Steps to 2 or more, or start the job with torchrun (docs/distributed.md); on "
            "one GPU, set base to 'offload' or 'stream'."
        )


def require_equal_shares(micro_batches: int) -> None:
    """Raise UserError if the processes would have different numbers of a step's micro-batches: those with
    fewer would leave the others waiting for their part of the base."""
    if micro_batches % distributed.world():
        raise UserError(
            f"base 'sharded': {micro_batches} micro-batches cannot be dealt out evenly to "
            f"{distributed.world()} processes. Set gradient accumulation to a multiple of "
            f"{distributed.world()}, or base to 'auto'."
        )


class ShardedBlocks:
    """This process's shards of all blocks, and the block in use."""

    def __init__(self, device: torch.device) -> None:
        require_processes()
        self.device = device
        self.ahead = has_streams(device)
        """Whether the next block is gathered while one is used; on the CPU both take the same cores."""
        self._weights: dict[str, dict[str, StoredWeight]] = {}
        """Block -> layer -> its weight's shards."""
        self._layouts: dict[str, list[tuple[torch.Size, torch.dtype]]] = {}
        self._block, self._was_backward = "", False
        self._gathered: dict[str, list[Tensor]] = {}
        """Layer -> its bytes. Python keeps them for a while: gloo's thread lets go of a tensor shortly after
        wait() returns, and one that Python frees at that moment is freed twice."""
        self._on_the_way: dict[str, dict[str, list[Any]]] = {}
        self._mesh: Any = None

    def add(self, path: str, block: str, weight: StoredWeight) -> Callable[[torch.dtype], Tensor]:
        """Keep this process's share of a layer's host weight; return the function that gathers it whole."""
        self._layouts[path] = [(part.shape, part.dtype) for part in weight.parts]
        shards = tuple(self._shard(part) for part in weight.parts)
        self._weights.setdefault(block, {})[path] = replace(weight, parts=shards)
        dequantize = weight.dequantize_parts
        return lambda dtype: dequantize(self._gather(path, block), dtype)

    def clear(self) -> None:
        """Drop all weights."""
        self._drop_prefetched()
        self._gathered.clear()
        self._weights.clear()

    def _shard(self, whole: Tensor) -> Any:
        """Return 1/K of a tensor's bytes, on the device, as this process's part of a DTensor."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        world = distributed.world()
        self._mesh = self._mesh or init_device_mesh(self.device.type, (world,))
        flat = whole.detach().cpu().contiguous().flatten().view(torch.uint8)
        size = -(-len(flat) // world)
        own = torch.zeros(size, dtype=torch.uint8)
        mine = flat[distributed.rank() * size :][:size]
        own[: len(mine)].copy_(mine)
        return DTensor.from_local(own.to(self.device), self._mesh, [Shard(0)], run_check=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _gather(self, path: str, block: str) -> Parts:
        """Return a layer's weight; the first of a block gathers all of it."""
        is_backward = in_backward_pass()
        is_new_pass = self._was_backward and not is_backward
        self._was_backward = is_backward
        if block != self._block or is_new_pass:
            ready = self._on_the_way.pop(block, None)
            dropped = self._drop_prefetched()
            self._gathered.clear()
            self._block = block
            self._gathered = _finish(ready or self._begin(block))
            dropped.clear()
            following = self._following(block, is_backward) if self.ahead else None
            if following is not None:
                self._on_the_way[following] = self._begin(following)
        layouts = self._layouts[path]
        return tuple(_view(flat, *layout) for flat, layout in zip(self._gathered[path], layouts, strict=True))

    def _following(self, block: str, is_backward: bool) -> str | None:
        """Return the block that comes next in this pass; None at its end."""
        names = list(self._weights)
        index = names.index(block) + (-1 if is_backward else 1)
        return names[index] if 0 <= index < len(names) else None

    def _begin(self, block: str) -> dict[str, list[Any]]:
        from torch.distributed.tensor import Replicate

        return {
            path: [shard.redistribute(placements=[Replicate()], async_op=True) for shard in weight.parts]  # type: ignore[attr-defined]
            for path, weight in self._weights[block].items()
        }

    def _drop_prefetched(self) -> list[dict[str, list[Tensor]]]:
        """Wait for blocks that were gathered for nothing, as the other processes do; return them."""
        dropped = [_finish(gathers) for gathers in self._on_the_way.values()]
        self._on_the_way.clear()
        return dropped


def _finish(gathers: dict[str, list[Any]]) -> dict[str, list[Tensor]]:
    """Wait for a block; return the bytes of each layer's tensors."""
    return {path: [_wait(part.to_local()) for part in parts] for path, parts in gathers.items()}


def _wait(gathered: Any) -> Tensor:
    return gathered.wait() if hasattr(gathered, "wait") else gathered  # type: ignore[no-any-return]


def _view(flat: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return bytes as the tensor that they were."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return flat[:size].view(dtype).view(shape)
