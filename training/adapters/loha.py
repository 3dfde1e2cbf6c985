"""LoHa: the elementwise product of two low-rank matrices, of rank up to rank squared (Hyeon-Woo et al. 2021,
arXiv:2108.06098; for diffusion models Yeh et al. 2023, arXiv:2309.14859).

dW = (alpha / rank) * (w1_a @ w1_b) * (w2_a @ w2_b), on convolutions over the flattened kernel; with `tucker`
each half has the kernel as a third factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..frozen_base.frozen_layer import LayerSpec
from .base import Adapter
from .lora import kernel_can_be_decomposed


class LoHa(Adapter):
    """w1_a, w2_a (out, rank) and w1_b, w2_b (rank, in * kernel); with t1, t2 (rank, rank, *kernel) they are
    (rank, out) and (rank, in)."""

    suffixes = {name: f"hada_{name}" for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")}
    starts_at_zero = ("w2_a",)
    padded_with_zeros = ("w1_a", "w2_a")
    cores = ("t1", "t2")
    default_alpha = 1.0  # as in LyCORIS: both halves start large

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        out, wide, rank = spec.shape[0], math.prod(spec.shape[1:]), config.rank
        self.tucker = config.tucker and kernel_can_be_decomposed(spec)
        for half in "12":
            a = torch.empty(rank, out) if self.tucker else torch.empty(out, rank)
            b = torch.empty(rank, spec.shape[1]) if self.tucker else torch.empty(rank, wide)
            self.register_parameter(f"w{half}_a", nn.Parameter(a))
            self.register_parameter(f"w{half}_b", nn.Parameter(b))
            if self.tucker:
                self.register_parameter(f"t{half}", nn.Parameter(torch.empty(rank, rank, *spec.shape[2:])))

    def initialize(self, generator: torch.Generator, base: Tensor | None = None) -> None:
        """As LyCORIS: N(0, 1) inputs, N(0, 0.1) outputs and kernels, and zeros in `w2_a`, so dW is 0."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                nn.init.normal_(parameter, std=1.0 if name.endswith("_b") else 0.1, generator=generator)
            self.get_parameter("w2_a").zero_()

    @staticmethod
    def compose(weights: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        halves = []
        for half in "12":
            a, b, t = weights[f"w{half}_a"], weights[f"w{half}_b"], weights.get(f"t{half}")
            if mask is not None and half == "1":
                b = b * mask.to(b)[:, None]
            halves.append(a @ b if t is None else torch.einsum("r s h w, s i, r o -> o i h w", t, b, a))
        return halves[0] * halves[1]

    @staticmethod
    def rank_in(weights: Mapping[str, Tensor]) -> int | None:
        return weights["w1_b"].shape[0]
