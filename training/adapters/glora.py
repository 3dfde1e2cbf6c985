"""GLoRA: a low-rank change of the weight and of what it is applied to (Chavan et al. 2023, arXiv:2306.07967).

dW = (alpha / rank) * (W a1 a2 + b1 b2), as in LyCORIS: the layer on x + a1 a2 x, and a LoRA beside it. On a
convolution a1 a2 mixes the channels of x, and b2 keeps the kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..frozen_base.frozen_layer import FrozenLayer, LayerSpec, dtype_for
from ..user_error import UserError
from .dropout import Draw
from .lora import masked
from .multiplied import Multiplied


class GLoRA(Multiplied):
    """a1 (in, rank), a2 (rank, in), b1 (out, rank), b2 (rank, in, *kernel)."""

    suffixes = {name: f"{name}.weight" for name in ("a1", "a2", "b1", "b2")}
    starts_at_zero = ("a2", "b2")
    padded_with_zeros = ("a2", "b2")

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        out, inputs, *kernel = spec.shape
        rank = config.rank
        if out == inputs == rank:
            raise UserError(
                f"glora of rank {rank} cannot be saved for a layer with {out} inputs and outputs: ComfyUI "
                "takes it for the layout of an older LyCORIS. Set another rank, or exclude that layer."
            )
        self.a1 = nn.Parameter(torch.empty(inputs, rank))
        self.a2 = nn.Parameter(torch.empty(rank, inputs))
        self.b1 = nn.Parameter(torch.empty(out, rank))
        self.b2 = nn.Parameter(torch.empty(rank, inputs, *kernel))

    @staticmethod
    def compose(weights: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        """Return b1 b2, the part that does not depend on the base."""
        return masked(weights["b1"], mask) @ weights["b2"].flatten(1)

    @staticmethod
    def change(weights: Mapping[str, Tensor], base: Tensor, strength: float = 1.0) -> Tensor:
        mixed = torch.einsum("o i ..., i r, r j -> o j ...", base, weights["a1"], weights["a2"])
        return strength * (mixed + GLoRA.compose(weights).reshape(base.shape))

    @staticmethod
    def rank_in(weights: Mapping[str, Tensor]) -> int | None:
        return weights["a2"].shape[0]

    @classmethod
    def shape_in(cls, weights: Mapping[str, Tensor]) -> tuple[int, int]:
        mixed, inputs = weights["a1"] @ weights["a2"], weights["b2"].shape[1]
        if mixed.shape != (inputs, inputs) or len(weights["b2"]) != len(weights["a2"]):
            raise ValueError("a1 a2 has the inputs of b2, and both the same rank")
        return super().shape_in(weights)

    @classmethod
    def strength_factors(cls, names: Collection[str]) -> set[str]:
        return {"a2", "b2"}

    def forward(self, layer: FrozenLayer, x: Tensor) -> Tensor:
        draw = Draw(self.config, layer.name, x)
        if draw.leaves_out_module():
            return layer.forward(x)
        inputs, mask, dtype = draw.inputs(), draw.ranks(), dtype_for(x, self.a1.dtype)
        left, right = (self.scale * masked(self.a1, mask)).to(dtype), self.a2.to(dtype)
        y = layer.mix_columns(layer.forward, x, inputs, left, right)
        up = (self.scale * masked(self.b1, mask)).to(dtype)
        return y + layer.apply_low_rank(inputs, self.b2.to(dtype), up)

    @classmethod
    def file_tensors(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As the base class, with 1x1 kernels for a convolution, as LyCORIS writes them."""
        kernel = (1,) * (weights["b2"].ndim - 2)
        flat = {name: weights[name].reshape(*weights[name].shape, *kernel) for name in ("a1", "a2", "b1")}
        return super().file_tensors({**weights, **flat})

    @classmethod
    def from_file_tensors(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As the base class, without 1x1 kernels."""
        weights = super().from_file_tensors(tensors)
        return {name: tensor if name == "b2" else tensor.flatten(1) for name, tensor in weights.items()}

    @classmethod
    def other_form(cls, tensors: Mapping[str, Tensor]) -> str:
        if "dora_scale" in tensors:
            return "GLoRA with dora_scale"
        if len(tensors.keys() & set(cls.suffixes.values())) < len(cls.suffixes):
            return ""
        a1, a2, b1, b2 = (tensors[suffix] for suffix in cls.suffixes.values())
        new = len(b2) == b1.shape[1] == a1.shape[1] == len(a2)
        old = b2.shape[1] == len(b1) == len(a1) == a2.shape[1]
        # Both hold on a square layer, where the rank is the shorter side.
        is_old = old and (not new or len(a2) >= a2.shape[1])
        return "GLoRA in the layout of an older LyCORIS" if is_old else ""
