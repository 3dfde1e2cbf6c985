"""LoRA: the weight difference is a product of two thin matrices (Hu et al. 2021, arXiv:2106.09685).

dW = (alpha / rank) * up @ down. On a convolution `down` keeps the kernel and `up` is 1x1 (LoCon).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..layer import FrozenLayer, LayerSpec
from .base import Adapter, compute_dtype


class LoRA(Adapter):
    """down (rank, in, *kernel) and up (out, rank)."""

    suffixes = {"down": "lora_down.weight", "up": "lora_up.weight"}

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        self.down = nn.Parameter(torch.empty(config.rank, *spec.shape[1:]))
        self.up = nn.Parameter(torch.empty(spec.shape[0], config.rank))

    def initialise(self, generator: torch.Generator) -> None:
        """Kaiming-uniform `down` and zero `up`, as in the paper's code: dW is 0, and `up` gets a gradient at once."""
        with torch.no_grad():
            nn.init.kaiming_uniform_(self.down, a=math.sqrt(5), generator=generator)
            self.up.zero_()

    def delta(self) -> Tensor:
        return self.scale * (self.up @ self.down.flatten(1)).reshape(self.spec.shape)

    def forward(self, layer: FrozenLayer, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        return layer.forward(x) + self.scale * layer.apply_low_rank(x, self.down.to(dtype), self.up.to(dtype))
