"""The best approximation of a matrix at a lower rank: its largest singular values (Eckart and Young 1936)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..adapters.pissa import decomposable, principal
from ..user_error import UserError


def best_factors(
    matrix: Tensor, *, rank: int | None = None, energy: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return (up, down) with up @ down the best approximation of `matrix`, the singular values split evenly.

    `rank` is the largest rank, `energy` the share (0 to 1) of the squared singular values to keep; give at
    least one. The rank is never 0. By rank alone, a large matrix is decomposed only as far as needed
    (`principal`), whose error is at most a hundredth of a percent above the best.
    """
    _require_finite(matrix)
    if energy is None and rank is not None:
        u, s, v = principal(matrix, rank, torch.Generator().manual_seed(0))
        return _split_evenly(u, s, v, rank)
    u, s, v = torch.linalg.svd(decomposable(matrix), full_matrices=False)
    return _split_evenly(u, s, v, _rank_for(s, rank, energy))


def best_of_product(
    up: Tensor, down: Tensor, *, rank: int | None = None, energy: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `best_factors(up @ down)` at the cost of the factors' own rank: the product is never formed.

    Raises UserError where the product has numbers too large for float32.
    """
    q_up, r_up = torch.linalg.qr(decomposable(up))
    q_down, r_down = torch.linalg.qr(decomposable(down).T)
    core = r_up @ r_down.T
    _require_finite(core)
    u, s, v = torch.linalg.svd(core, full_matrices=False)
    return _split_evenly(q_up @ u, s, v @ q_down.T, _rank_for(s, rank, energy))


def check_size(rank: int | None, energy: float | None) -> None:
    """Raise UserError unless a rank of at least 1, or an energy above 0 and up to 1, is given."""
    if rank is None and energy is None:
        raise UserError("give a rank, or the share of the energy to keep, such as 0.95.")
    if rank is not None and rank < 1:
        raise UserError(f"rank must be at least 1, got {rank}.")
    if energy is not None and not 0 < energy <= 1:
        raise UserError(f"energy must be above 0 and at most 1, got {energy}; 0.95 keeps most of it.")


def _require_finite(matrix: Tensor) -> None:
    if not bool(torch.isfinite(matrix).all()):
        raise UserError("its difference holds infinite numbers or NaN; it cannot be resized.")


def _rank_for(s: Tensor, rank: int | None, energy: float | None) -> int:
    needed = len(s)
    if energy is not None:
        shares = s.double().square().cumsum(0) / s.double().square().sum().clamp_min(1e-300)
        needed = int((shares < energy - 1e-12).sum()) + 1
    return max(1, min(needed, rank or needed, len(s)))


def _split_evenly(u: Tensor, s: Tensor, v: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).contiguous(), (root[:, None] * v[:rank]).contiguous()
