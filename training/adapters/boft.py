"""BOFT: outputs turned in stages, each over outputs farther apart (Liu et al. 2023, arXiv:2311.06243).

W' = R_m ... R_1 W; stage i turns blocks that take half their outputs from each of two neighbors at distance
2^i * size / 2, so that after the last stage every output depends on all: OFT's freedom with fewer parameters.
The rank is the largest size of a block; LyCORIS's rule, so that its files keep their shapes.

ComfyUI applies a file exactly at strength 1; at another strength s, each stage takes s of its turn, and the
weight s of the difference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..user_error import UserError
from .oft import OFT


class BOFT(OFT):
    """blocks (stages, number, size, size), of which B - B^T counts."""

    network_types = {}
    lycoris_names = ()

    @classmethod
    def block_shape(cls, outputs: int, rank: int) -> tuple[int, ...]:
        sizes = [size for size in range(2, outputs + 1, 2) if _is_power_of_2(outputs / size)]
        if not sizes or sizes[0] > rank:
            instead = f"a rank of {sizes[0]} or more" if sizes else "no rank"
            raise UserError(
                f"boft of rank {rank} cannot divide a layer with {outputs} outputs into a power of 2 of even "
                f"blocks: it takes {instead}; exclude that layer, or use LoRA for it."
            )
        size = max(size for size in sizes if size <= rank)
        number = outputs // size
        return number.bit_length(), number, size, size

    @staticmethod
    def apply_turns(turns: Tensor, v: Tensor, strength: float = 1.0) -> Tensor:
        size, rest = turns.shape[-1], v.shape[1:]
        added = torch.zeros_like(v)
        for stage, turn in enumerate(turns.to(v.dtype)):
            apart = 2**stage * size // 2
            parts = (v + added).reshape(-1, 2, apart, *rest).transpose(1, 2).reshape(-1, size, *rest)
            moved = torch.einsum("b i j, b j ... -> b i ...", strength * turn, parts)
            added = added + moved.reshape(-1, apart, 2, *rest).transpose(1, 2).reshape(v.shape)
        return strength * added

    @classmethod
    def is_in(cls, tensors: Mapping[str, Tensor]) -> bool:
        return tensors["oft_blocks"].ndim == 4

    @classmethod
    def other_form(cls, tensors: Mapping[str, Tensor]) -> str:
        return super().other_form(tensors) or ("" if "alpha" in tensors else "BOFT without alpha")


def _is_power_of_2(ratio: float) -> bool:
    return ratio.is_integer() and int(ratio).bit_count() == 1
