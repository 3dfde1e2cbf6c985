"""OFT: a layer's outputs are turned in blocks by orthogonal matrices (Qiu et al. 2023, arXiv:2306.07280).

W' = R^T W with R = (1 + Q) (1 - Q)^-1 block by block, Q = B - B^T (Cayley). The rank is the size of a block,
as in LyCORIS's diag-oft. Turning the weight's rows is turning the outputs, so that no weight is formed.

ComfyUI applies a file exactly at strength 1; at another strength s it applies s^2 of the difference. It also
takes alpha for a constraint, other than LyCORIS's, and leaves `rescale` out: neither is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..frozen_base.frozen_layer import FrozenLayer, LayerSpec, dtype_for
from ..user_error import UserError
from .base import compute_without_saving
from .dropout import Draw
from .lokr import factorize
from .lora import masked
from .multiplied import Multiplied


class OFT(Multiplied):
    """blocks (number, size, size), of which B - B^T counts."""

    suffixes = {"blocks": "oft_blocks"}
    starts_at_zero = ("blocks",)
    padded_with_zeros = ()
    has_alpha = False
    is_even_in_strength = False
    network_types: ClassVar[Mapping[str, Mapping[str, bool]]] = {"diag-oft": {}}
    lycoris_names: ClassVar[tuple[str, ...]] = ("diag-oft",)

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        self.blocks = nn.Parameter(torch.empty(self.block_shape(spec.shape[0], config.rank)))

    @classmethod
    def block_shape(cls, outputs: int, rank: int) -> tuple[int, ...]:
        """Return the shape of `blocks`: LyCORIS's division of a layer's outputs, or one block of all.

        Raises UserError where blocks of 2 to `rank` outputs do not divide them.
        """
        size, number = factorize(outputs, rank)
        if size == 1 and outputs <= rank:  # LyCORIS would turn nothing
            size, number = outputs, 1
        if size < 2:
            raise UserError(
                f"oft turns blocks of 2 to {rank} outputs (rank), and none divide a layer with {outputs}: "
                "set another rank, exclude that layer, or use LoRA for it."
            )
        return number, size, size

    def initialize(self, generator: torch.Generator, base: Tensor | None = None) -> None:
        """Set the blocks to 0, so that nothing is turned."""
        with torch.no_grad():
            self.blocks.zero_()

    @staticmethod
    def compose(weights: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        """Return R - 1 = 2 Q (1 - Q)^-1 of every block; `mask` multiplies what a block's outputs gain."""
        blocks = weights["blocks"]
        blocks = blocks if blocks.dtype == torch.float64 else blocks.float()
        q = blocks - blocks.mT
        turn: Tensor = 2 * torch.linalg.solve(
            torch.eye(q.shape[-1], dtype=q.dtype, device=q.device) - q, q, left=False
        )
        return masked(turn, None if mask is None else mask[: q.shape[-1]])

    @staticmethod
    def rank_in(weights: Mapping[str, Tensor]) -> int | None:
        return weights["blocks"].shape[-1]

    @staticmethod
    def apply_turns(turns: Tensor, v: Tensor, strength: float = 1.0) -> Tensor:
        """Return what turning adds to v (outputs, ...), for the result of `compose`."""
        parts = v.reshape(*turns.shape[:2], *v.shape[1:])
        return strength**2 * torch.einsum("k n m, k n ... -> k m ...", turns.to(v.dtype), parts).flatten(0, 1)

    @classmethod
    def change(cls, weights: Mapping[str, Tensor], base: Tensor, strength: float = 1.0) -> Tensor:
        return cls.apply_turns(cls.compose(weights), base, strength)

    def product(self, mask: Tensor | None = None) -> Tensor:
        """Return the matrices less the unit matrix, of every block."""
        return self.compose(dict(self.named_parameters()), mask)

    def forward(self, layer: FrozenLayer, x: Tensor) -> Tensor:
        """Turn the layer's outputs; where they cannot be turned as its weight can, add the difference."""
        draw = Draw(self.config, layer.name, x)
        y = layer.forward(x)
        if draw.leaves_out_module():
            return y
        inputs, mask, axis = draw.inputs(), draw.ranks(), layer.output_axis
        if axis is None:
            return y + self.difference(layer, inputs, mask)
        v = (y if inputs is x else layer.forward(inputs)).movedim(axis, 0)
        if layer.bias is not None:
            v = v - layer.bias(v.dtype, v.device).reshape(-1, *(1,) * (v.ndim - 1))
        return y + self.apply_turns(self.product(mask), v).movedim(0, axis)

    def difference(self, layer: FrozenLayer, x: Tensor, mask: Tensor | None) -> Tensor:
        def apply(x: Tensor, *parameters: Tensor) -> Tensor:
            weight = layer.weight(dtype_for(x, self.blocks.dtype), x.device)
            return layer.apply_weight(x, self.apply_turns(self.product(mask), weight))

        return compute_without_saving(apply, x, *self.parameters())

    @classmethod
    def file_tensors(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As the base class, with an alpha of 0: no constraint. ComfyUI applies no BOFT without one."""
        return {**super().file_tensors(weights), "alpha": torch.tensor(0.0)}

    @classmethod
    def shape_in(cls, weights: Mapping[str, Tensor]) -> tuple[int, int]:
        *_, number, size, other = weights["blocks"].shape
        if size != other:
            raise ValueError("blocks are square")
        return number * size, 0

    @classmethod
    def is_in(cls, tensors: Mapping[str, Tensor]) -> bool:
        return tensors["oft_blocks"].ndim == 3

    @classmethod
    def other_form(cls, tensors: Mapping[str, Tensor]) -> str:
        name, alpha = cls.__name__, tensors.get("alpha")
        if "rescale" in tensors:
            return f"{name} with rescale"
        if "dora_scale" in tensors:
            return f"{name} with dora_scale"
        return f"{name} with a constraint" if alpha is not None and bool((alpha > 0).any()) else ""
