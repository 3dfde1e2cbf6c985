"""LoKr: a Kronecker product of a small factor and a large low-rank one (Yeh et al. 2023, arXiv:2309.14859).

dW = (alpha / rank) * kron(w1, w2) with w1 (out1, in1), w2 (out2, in2, *kernel) = w2_a @ w2_b.
`decompose_both` makes w1 a product too; where the rank saves nothing, and with `full_matrix`, a factor
stays whole. Two whole factors have no rank: loaders, and this, apply them at strength 1 whatever alpha is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..frozen_base.frozen_layer import LayerSpec
from .base import Adapter
from .lora import masked
from .select import for_layer


class LoKr(Adapter):
    """w1, or w1_a (out1, rank) and w1_b (rank, in1); w2, or w2_a (out2, rank) and w2_b (rank, in2 * kernel).

    Files of LyCORIS may have t2 (rank, rank, *kernel) with w2_a (rank, out2) and w2_b (rank, in2).
    """

    suffixes = {name: f"lokr_{name}" for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")}
    starts_at_zero = ("w2", "w2_b")
    padded_with_zeros = ("w1_b", "w2_b")
    network_types = {"lokr_full_rank": {"full_matrix": True}}

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        out1, out2 = factorize(spec.shape[0], config.factor)
        in1, in2 = factorize(spec.shape[1], config.factor)
        kernel, rank = spec.shape[2:], config.rank
        self.whole1 = config.full_matrix or not config.decompose_both or rank >= max(out1, in1) / 2
        self.whole2 = config.full_matrix or rank >= max(out2, in2) / 2
        if self.whole1 and self.whole2:
            self.scale = 1.0
        if self.whole1:
            self._add("w1", out1, in1)
        else:
            self._add("w1_a", out1, rank)
            self._add("w1_b", rank, in1)
        if self.whole2:
            # ComfyUI takes the Kronecker product of a whole w2 of a one-dimensional convolution over the
            # wrong axes, and of a flat one over the right ones.
            self._add("w2", out2, *((in2, *kernel) if len(kernel) == 2 else (in2 * math.prod(kernel),)))
        else:
            self._add("w2_a", out2, rank)
            self._add("w2_b", rank, in2 * math.prod(kernel))

    @staticmethod
    def compose(weights: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        w1 = weights["w1"] if "w1" in weights else weights["w1_a"] @ weights["w1_b"]
        if "w2" in weights:
            w2 = weights["w2"].flatten(1)
        elif "t2" in weights:
            a = masked(weights["w2_a"].T, mask)
            core = torch.einsum("r s h w, s i, o r -> o i h w", weights["t2"], weights["w2_b"], a)
            w2 = core.contiguous().flatten(1)
        else:
            w2 = masked(weights["w2_a"], mask) @ weights["w2_b"]
        return torch.kron(w1, w2)

    @staticmethod
    def rank_in(weights: Mapping[str, Tensor]) -> int | None:
        decomposed = weights.get("w2_b", weights.get("w1_b"))
        return None if decomposed is None else decomposed.shape[0]

    @classmethod
    def settings_of(
        cls, config: AdapterConfig, layers: Mapping[str, tuple[LayerSpec, Mapping[str, Tensor]]]
    ) -> AdapterConfig:
        """Return `config` with the settings that give every layer the file's factors, or as it is."""
        sides = Counter(side for _, weights in layers.values() for side in small_factor(weights))
        for factor in (-1, *(side for side, _ in sides.most_common() if side >= 2)):
            for both, full in ((False, False), (True, False), (False, True)):
                tried = replace(config, factor=factor, decompose_both=both, full_matrix=full)
                with torch.device("meta"):
                    adapters = {p: cls(spec, for_layer(tried, p)) for p, (spec, _) in layers.items()}
                ours = {p: _sizes(adapter.named_parameters()) for p, adapter in adapters.items()}
                if ours == {p: _sizes(weights.items()) for p, (_, weights) in layers.items()}:
                    return tried
        return config

    def _add(self, name: str, *shape: int) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))


def factorize(size: int, factor: int) -> tuple[int, int]:
    """Return (m, n), m * n == size and m <= n: m is `factor` where that divides, else the largest up to it.

    -1 gives the m nearest to the square root. LyCORIS's rule, so that its files keep their shapes.
    """
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    limit = min(factor, math.isqrt(size)) if factor > 0 else math.isqrt(size)
    m = max(m for m in range(1, max(limit, 1) + 1) if size % m == 0)
    return m, size // m


def small_factor(weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the shape (out1, in1) of w1."""
    if "w1" in weights:
        return weights["w1"].shape[0], weights["w1"].shape[1]
    return weights["w1_a"].shape[0], weights["w1_b"].shape[1]


def _sizes(weights: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in weights}
