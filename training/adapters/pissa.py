"""PiSSA: LoRA that starts from the base weight's principal components (Meng et al. 2024, arXiv:2404.02948).

The paper moves them out of the base; here the base stays whole and their start values are subtracted:
    dW = (alpha / rank) * (up @ down - up0 @ down0)
which trains the same and is a plain LoRA of twice the rank in the file; loaders render it on the whole base.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..frozen_base.frozen_layer import FrozenLayer, LayerSpec, dtype_for
from ..user_error import UserError
from .lora import LoRA, masked


class PiSSA(LoRA):
    """LoRA's factors, and `down0`, `up0`: their start values, parameters that are not trained."""

    needs_base = True
    can_be_fused = False
    ranks_in_file = 2

    def __init__(self, spec: LayerSpec, config: AdapterConfig) -> None:
        super().__init__(spec, config)
        self.down0 = nn.Parameter(torch.empty_like(self.down), requires_grad=False)
        self.up0 = nn.Parameter(torch.empty_like(self.up), requires_grad=False)

    def initialize(self, generator: torch.Generator, base: Tensor | None = None) -> None:
        """Split the largest singular values evenly between the factors; draw what is missing as in LoRA."""
        if base is None:
            raise UserError("PiSSA starts from the base weight; give it, as in initialize(generator, base).")
        super().initialize(generator)
        u, s, v = principal(base.flatten(1), self.config.rank, generator)
        root = (s / self.scale).sqrt()
        with torch.no_grad():
            self.up[:, : len(s)] = u * root
            self.down[: len(s)] = (root[:, None] * v).reshape(-1, *self.spec.shape[1:])
            self.up0.copy_(self.up)
            self.down0.copy_(self.down)

    @staticmethod
    def compose(weights: Mapping[str, Tensor], mask: Tensor | None = None) -> Tensor:
        start = masked(weights["up0"], mask) @ weights["down0"].flatten(1)
        return LoRA.compose(weights, mask) - start

    def difference(self, layer: FrozenLayer, x: Tensor, mask: Tensor | None) -> Tensor:
        dtype = dtype_for(x, self.up.dtype)
        start = layer.apply_low_rank(x, self.down0.to(dtype), masked(self.up0, mask).to(dtype))
        return super().difference(layer, x, mask) - self.scale * start

    @classmethod
    def file_tensors(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a plain LoRA: trained and starting factors side by side."""
        down = torch.cat([weights["down"], weights["down0"]])
        up = torch.cat([weights["up"], -weights["up0"]], 1)
        return super().file_tensors({"down": down, "up": up})


def principal(matrix: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest singular values s (n,) of a matrix with u (rows, n) and v (n, columns); n <= rank.

    Small matrices exactly; large ones by subspace iteration, whose error is far below what training moves
    (Halko et al. 2011, arXiv:0909.4061, algorithm 4.4).
    """
    matrix = decomposable(matrix)
    rank = min(rank, *matrix.shape)
    if min(matrix.shape) <= 4 * rank or min(matrix.shape) <= 256:
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        return u[:, :rank], s[:rank], v[:rank]
    sketch = torch.randn(matrix.shape[1], rank + 8, generator=generator).to(matrix)
    for _ in range(8):
        sketch = torch.linalg.qr(matrix.T @ torch.linalg.qr(matrix @ sketch)[0])[0]
    q = torch.linalg.qr(matrix @ sketch)[0]
    u, s, v = torch.linalg.svd(q.T @ matrix, full_matrices=False)
    return (q @ u)[:, :rank], s[:rank], v[:rank]


def decomposable(matrix: Tensor) -> Tensor:
    """Return a matrix in float32 where PyTorch can decompose it: not on Apple's or Intel's cards."""
    return matrix.float() if matrix.device.type in ("cpu", "cuda") else matrix.cpu().float()
