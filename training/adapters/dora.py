"""DoRA: LoRA adapts the direction of each weight column, one number its length (Liu et al. 2024,
arXiv:2402.09353).

W' = m * (W + dW) / (|W + dW| + eps), the norm taken over everything but axis 1 of the weight, the input axis:
the only form that ComfyUI renders as the paper defines it (its `weight_decompose` divides by |W|, without dW,
on the output axis). So W' is W + dW with scaled columns, which is the layer itself on a scaled input, and no
weight is formed. As in the paper (section 4.3) the norm is a constant in the backward pass.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..frozen_base.frozen_layer import FrozenLayer, LayerSpec, dtype_for
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
    is_plain = False
    lycoris_names = ()

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        if spec.shape[0] == 1:
            raise UserError(
                "DoRA cannot be saved for a layer with one output: loaders take its magnitudes for those of "
                "the output axis. Exclude that layer, or use LoRA for it."
            )
        self.magnitude = nn.Parameter(torch.empty(1, spec.shape[1], *(1,) * len(spec.shape[2:])))

    def initialize(self, generator: torch.Generator, base: Tensor | None = None) -> None:
        """Set the factors as LoRA does, and the magnitudes to the base's own lengths."""
        super().initialize(generator, base)
        with torch.no_grad():
            self.magnitude.copy_(column_lengths(_given(base)))

    def delta(self, base: Tensor | None = None) -> Tensor:
        base = _given(base).to(self.magnitude)
        moved = base + self.product()
        return moved * (self.magnitude / column_lengths(moved.detach())) - base

    def factors(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter is not self.magnitude]

    def complete(self, present: Collection[str], base: FrozenLayer | None) -> None:
        """Set the magnitudes that a plain LoRA has beside its base."""
        if "magnitude" not in present:
            weight = base.weight(torch.float32, self.magnitude.device) if base else None
            self.magnitude.copy_(column_lengths(_given(weight) + self.product()))

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


def apply_magnitude(moved: Tensor, base: Tensor, magnitude: Tensor, *, over_outputs: bool) -> Tensor:
    """Return the weight `moved`, base + product, at the lengths of a file's `dora_scale`, as ComfyUI does.

    `over_outputs` divides rows instead of columns, by the lengths of the base without the LoRA.
    """
    kernel = (1,) * (moved.ndim - 2)
    if over_outputs:
        lengths = base.flatten(1).norm(dim=1).reshape(-1, 1, *kernel) + EPS
        return moved.mul(magnitude.float().reshape(-1, 1, *kernel) / lengths)
    return moved.mul(magnitude.float().reshape(1, -1, *kernel) / column_lengths(moved))


def column_lengths(weight: Tensor) -> Tensor:
    """Return the norms over every axis but the second, (1, in, 1, ...), plus EPS as in ComfyUI."""
    axes = [axis for axis in range(weight.ndim) if axis != 1]
    lengths: Tensor = torch.linalg.vector_norm(weight, dim=axes, keepdim=True)
    return lengths + EPS


def _given(base: Tensor | None) -> Tensor:
    if base is None:
        raise UserError(
            "DoRA depends on the base weight; give it, as in delta(base) and initialize(generator, base)."
        )
    return base
