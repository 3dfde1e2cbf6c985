"""DoRA: LoRA adapts a weight column's direction, a number its length (Liu et al. 2024, arXiv:2402.09353).

W' = m * (W + dW) / (|W + dW| + eps), the norm taken over everything but axis 1 of the weight, the input axis:
the only form that ComfyUI renders as the paper defines it (its `weight_decompose` divides by |W|, without dW,
on the output axis). So W' is W + dW with scaled columns, which is the layer itself on a scaled input: no
weight is formed for it. As in the paper (section 4.3) the norm counts as a constant in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..network.frozen_layer import FrozenLayer, LayerSpec, dtype_for
from ..user_error import UserError
from .dropout import Draw
from .lora import LoRA

EPS = torch.finfo(torch.float32).eps
"""ComfyUI adds this to the norm when it patches in float32."""


class DoRA(LoRA):
    """LoRA's factors and `magnitude` (1, in, 1, ...): the length of each column."""

    suffixes = {**LoRA.suffixes, "magnitude": "dora_scale"}
    needs_base = True
    exact = ("magnitude",)

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        if spec.shape[0] == 1:
            raise UserError(
                "DoRA cannot be saved for a layer with one output: loaders take its magnitudes for those of "
                "the output axis. Exclude that layer, or use LoRA for it."
            )
        self.magnitude = nn.Parameter(torch.empty(1, spec.shape[1], *(1,) * len(spec.shape[2:])))

    def initialize(self, generator: torch.Generator, base: Tensor | None = None) -> None:
        """As LoRA, and the base's own lengths."""
        super().initialize(generator, base)
        with torch.no_grad():
            self.magnitude.copy_(column_lengths(_given(base)))

    def delta(self, base: Tensor | None = None) -> Tensor:
        base = _given(base).to(self.magnitude)
        moved = base + self.product()
        return moved * (self.magnitude / column_lengths(moved.detach())) - base

    def factors(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter is not self.magnitude]

    def forward(self, layer: FrozenLayer, x: Tensor) -> Tensor:
        draw = Draw(self.config, layer.name, x)
        if draw.leaves_out_module():
            return layer.forward(x)
        mask = draw.ranks()
        with torch.no_grad():
            base = layer.weight(self.magnitude.dtype, x.device)
            lengths = column_lengths(base + self.product(mask))
        change = ((self.magnitude - lengths) / lengths).flatten().to(dtype_for(x, self.magnitude.dtype))
        y = layer.scale_columns(layer.forward, x, change)
        return y + layer.scale_columns(lambda x: self.difference(layer, x, mask), draw.inputs(), change)


def column_lengths(weight: Tensor) -> Tensor:
    """Return the norms over every axis but the second, as (1, in, 1, ...), kept above 0 as ComfyUI does."""
    axes = [axis for axis in range(weight.ndim) if axis != 1]
    lengths: Tensor = torch.linalg.vector_norm(weight, dim=axes, keepdim=True)
    return lengths + EPS


def _given(base: Tensor | None) -> Tensor:
    if base is None:
        raise UserError(
            "DoRA depends on the base weight; give it, as in delta(base) and initialize(generator, base)."
        )
    return base
