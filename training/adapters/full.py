"""The full difference: a number for every number of the weight and of its bias, as in fine-tuning.

As large as the layer. Loaders add `diff` and `diff_b` as they are: there is no rank and no alpha.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..frozen_base.frozen_layer import FrozenLayer, LayerSpec, dtype_for
from .base import Adapter, compute_without_saving


class Full(Adapter):
    """weight, in the shape of the weight, and bias (out,) where the layer has one."""

    suffixes = {"weight": "diff", "bias": "diff_b"}
    starts_at_zero = ("weight", "bias")
    padded_with_zeros = ()
    has_alpha = False
    network_types = {"diff": {}, "full-diff": {}}

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        self.weight = nn.Parameter(torch.empty(spec.shape))
        self.bias = nn.Parameter(torch.empty(spec.shape[0])) if spec.has_bias else None

    def initialize(self, generator: torch.Generator, base: Tensor | None = None) -> None:
        """Set every difference to 0."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    @staticmethod
    def compose(weights: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        return weights["weight"]

    @staticmethod
    def rank_in(weights: Mapping[str, Tensor]) -> int | None:
        return None

    def factors(self) -> list[nn.Parameter]:
        return [self.weight]

    def difference(self, layer: FrozenLayer, x: Tensor, mask: Tensor | None) -> Tensor:
        def apply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            dtype = dtype_for(x, weight.dtype)
            return layer.apply_weight(x, weight.to(dtype), None if bias is None else bias.to(dtype))

        return compute_without_saving(apply, x, *self.parameters())
