"""LoRA: the weight difference is a product of two thin matrices (Hu et al. 2021, arXiv:2106.09685).

dW = (alpha / rank) * up @ down. On a convolution `down` keeps the kernel and `up` is 1x1 (LoCon); with
`tucker` the kernel is a third factor, `mid`, between 1x1 ones (Yeh et al. 2023, arXiv:2309.14859, app. B).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..frozen_base.frozen_layer import FrozenLayer, LayerSpec, dtype_for
from . import fused
from .base import Adapter
from .dropout import Draw


class LoRA(Adapter):
    """down (rank, in, *kernel), up (out, rank); with `mid` (rank, rank, *kernel) down is (rank, in, 1, 1)."""

    suffixes = {"down": "lora_down.weight", "up": "lora_up.weight", "mid": "lora_mid.weight"}
    starts_at_zero: ClassVar[tuple[str, ...]] = ("up",)
    padded_with_zeros = ("up",)
    cores = ("mid",)
    is_plain = True
    can_be_fused: ClassVar[bool] = True
    """Whether the difference is scale * up @ down and nothing else."""
    lycoris_names: ClassVar[tuple[str, ...]] = ("locon",)

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        kernel = spec.shape[2:]
        self.tucker = config.tucker and kernel_can_be_decomposed(spec)
        self.down = nn.Parameter(
            torch.empty(config.rank, spec.shape[1], *((1,) * len(kernel) if self.tucker else kernel))
        )
        self.up = nn.Parameter(torch.empty(spec.shape[0], config.rank))
        if self.tucker:
            self.mid = nn.Parameter(torch.empty(config.rank, config.rank, *kernel))

    def initialize(self, generator: torch.Generator, base: Tensor | None = None) -> None:
        """Set `down` Kaiming-uniform (or N(0, 1/rank)) and `up` to 0, as the paper's code: dW is 0."""
        with torch.no_grad():
            for factor in (self.down, self.mid) if self.tucker else (self.down,):
                if self.config.init == "gaussian":
                    nn.init.normal_(factor, std=1 / self.config.rank, generator=generator)
                else:
                    nn.init.kaiming_uniform_(factor, a=math.sqrt(5), generator=generator)
            self.up.zero_()

    @staticmethod
    def compose(weights: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        return masked(weights["up"], mask) @ thin_down(weights).flatten(1)

    @staticmethod
    def rank_in(weights: Mapping[str, Tensor]) -> int | None:
        return weights["down"].shape[0]

    @staticmethod
    def two_factors(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        return weights["up"], thin_down(weights)

    def forward(self, layer: FrozenLayer, x: Tensor) -> Tensor:
        """Compute as the base class does, fused into one function where nothing is dropped out."""
        drops_nothing = Draw(self.config, layer.name, x).drops_nothing()
        if self.can_be_fused and drops_nothing and fused.can_fuse(layer):
            return fused.low_rank(layer, x, thin_down(dict(self.named_parameters())), self.up, self.scale)
        return super().forward(layer, x)

    def difference(self, layer: FrozenLayer, x: Tensor, mask: Tensor | None) -> Tensor:
        dtype = dtype_for(x, self.up.dtype)
        down, up = thin_down(dict(self.named_parameters())), masked(self.up, mask)
        return self.scale * layer.apply_low_rank(x, down.to(dtype), up.to(dtype))

    @classmethod
    def file_tensors(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As the base class, with a 1x1 kernel for a convolution's `up`, as all other programs write it."""
        tensors = super().file_tensors(weights)
        kernel = (1,) * (weights["down"].ndim - 2)
        return {**tensors, cls.suffixes["up"]: weights["up"].reshape(*weights["up"].shape, *kernel)}

    @classmethod
    def from_file_tensors(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As the base class, without the 1x1 kernel of a convolution's `up`."""
        weights = super().from_file_tensors(tensors)
        return {**weights, "up": weights["up"].flatten(1)} if "up" in weights else weights

    def adapt_factors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fold a Tucker core into `down` where this adapter has none."""
        if "mid" not in weights or self.tucker:
            return dict(weights)
        factors = {name: tensor for name, tensor in weights.items() if name != "mid"}
        return {**factors, "down": thin_down(weights)}


def thin_down(weights: Mapping[str, Tensor]) -> Tensor:
    """Return `down` with the kernel in it: (rank, in, *kernel)."""
    if "mid" not in weights:
        return weights["down"]
    return torch.einsum("r s h w, s i -> r i h w", weights["mid"], weights["down"].flatten(1))


def masked(factor: Tensor, mask: Tensor | None) -> Tensor:
    """Return a factor (n, rank) with its columns multiplied by `mask` (rank,)."""
    return factor if mask is None else factor * mask.to(factor)


def kernel_can_be_decomposed(spec: LayerSpec) -> bool:
    """Return whether a Tucker decomposition makes sense here: ComfyUI loads it for 2D kernels only."""
    return spec.kind == "conv2d" and any(side > 1 for side in spec.shape[2:])
