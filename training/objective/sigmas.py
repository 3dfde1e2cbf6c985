"""The sigmas of training: distributions of the timestep, and its shift by image size.

A timestep t runs from 0 (the clean image) to 1 (pure noise). For a rectified-flow model it is sigma itself,
for every other model the place in the schedule, by `percent_to_sigma`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..config import ObjectiveConfig
from ..family import Family
from ..model import Sampling
from ..user_error import UserError
from .settled import settled


def draw_sigmas(
    count: int,
    config: ObjectiveConfig,
    family: Family,
    sampling: Sampling,
    *,
    generator: torch.Generator,
    tokens: float,
) -> Tensor:
    """Draw `count` sigmas for images of `tokens` tokens each: (count,) float32 within the model's own range.

    With `config.stratified`, each comes from another of `count` equal parts of the distribution, in random
    order: the variance of a batch's loss falls, and no expectation changes.

    Raises UserError for an unknown distribution.
    """
    name = settled(config, family).sigmas
    if name not in SIGMAS:
        raise UserError(f"sigmas: {name!r} is unknown; choose one of auto, {', '.join(SIGMAS)}.")
    order = torch.randperm(count, generator=generator)
    u = torch.rand(count, generator=generator)
    if config.stratified:
        u = (order + u) / count
    shift, flow = shift_for(tokens, config, family), is_flow(sampling)

    def timesteps(u: Tensor) -> Tensor:
        return shift_timesteps(SIGMAS[name](apply_bias(u.clamp(1e-4, 1 - 1e-4), config.bias), config), shift)

    def sigmas(t: Tensor) -> Tensor:
        return to_sigmas(sampling, t, flow=name != "schedule" and flow)

    if config.noise_range == "cut":
        level = (lambda u: sigmas(timesteps(u))) if flow else timesteps
        return sigmas(timesteps(cut(u, level, config)))
    return sigmas(config.min_noise + (config.max_noise - config.min_noise) * timesteps(u))


def cut(u: Tensor, level: Callable[[Tensor], Tensor], config: ObjectiveConfig) -> Tensor:
    """Return u in 0..1, moved into the part of 0..1 whose noise levels are from `min_noise` to `max_noise`.

    `level` is increasing, so the ends of that part are found by bisection. Below `max_noise`, unless that is
    1: two ranges that meet share no level. Raises UserError where the model has no level in the range.
    """
    wanted, low, high = torch.tensor([config.min_noise, config.max_noise]), torch.zeros(2), torch.ones(2)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = level(middle) < wanted
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    start, end = float(high[0]) if config.min_noise else 0.0, float(low[1]) if config.max_noise < 1 else 1.0
    if start >= end:
        raise UserError(
            f"min_noise {config.min_noise:g} and max_noise {config.max_noise:g}: the model has no noise "
            "level between them; widen the range."
        )
    return start + (end - start) * u


HALVINGS = 24
"""Of 0..1: float32 has no finer parts near 1."""


def to_sigmas(sampling: Sampling, timesteps: Tensor, *, flow: bool) -> Tensor:
    """Return the model's sigmas at timesteps in 0..1: the same for flow, else that far along its schedule."""
    sigmas = (
        timesteps
        if flow
        else torch.tensor([float(sampling.percent_to_sigma(1.0 - float(t))) for t in timesteps])
    )
    return sigmas.float().clamp(float(sampling.sigma_min), float(sampling.sigma_max))


def is_flow(sampling: Sampling) -> bool:
    """Return whether x_t goes straight from image to noise, so that sigma is its share of noise."""
    zero, one = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    half = torch.full((1, 1, 1, 1), 0.5)
    return math.isclose(sampling.noise_scaling(half, zero.clone(), one).item(), 0.5, rel_tol=1e-6)


def shift_for(tokens: float, config: ObjectiveConfig, family: Family) -> float:
    """Return the shift for images of `tokens` tokens: the setting or the family's, adapted to the size by
    `resolution_shift`.
    """
    config = settled(config, family)
    return RESOLUTION_SHIFTS[config.resolution_shift](config.shift, tokens)


def shift_timesteps(timestep: Tensor, shift: float) -> Tensor:
    """Move timesteps towards noise for shift > 1: shift*t / (1 + (shift-1)*t).

    Esser et al. 2024, arXiv:2403.03206, eq. 23.
    """
    return shift * timestep / (1.0 + (shift - 1.0) * timestep)


def flux_shift(tokens: float) -> float:
    """exp(mu), mu linear in the number of tokens: 0.5 at 256, 1.15 at 4096.

    black-forest-labs/flux, sampling.py, get_schedule.
    """
    return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))


def ltx_shift(tokens: float) -> float:
    """exp(mu), mu linear in the number of tokens: 0.95 at 1024, 2.05 at 4096, and no more beyond.

    Lightricks/LTX-2, ltx_trainer/timestep_samplers.py, which mixes in other levels to go further.
    """
    return math.exp(0.95 + (2.05 - 0.95) * (min(tokens, 4096) - 1024) / (4096 - 1024))


def sd3_shift(shift: float, tokens: float) -> float:
    """shift * sqrt(m / n): m tokens look as noisy as n = 4096 (1024x1024 pixels) at `shift`.

    Esser et al. 2024, arXiv:2403.03206, sec. 5.3.2.
    """
    return shift * math.sqrt(tokens / 4096)


def apply_bias(u: Tensor, bias: float) -> Tensor:
    """Make uniform u in (0, 1) denser near 1 for bias > 0 and near 0 for bias < 0: u ** (2 ** -bias)."""
    return u if bias == 0 else u ** (2.0**-bias)


def logit_normal(u: Tensor, *, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Quantile function of sigmoid(N(mean, std)), densest at medium noise (arXiv:2403.03206, eq. 19)."""
    return torch.sigmoid(mean + std * torch.special.ndtri(u))


def mode(u: Tensor, *, scale: float = 1.29) -> Tensor:
    """The mode distribution with heavy tails, f(v) = 1 - v - s*(cos(pi*v/2)^2 - 1 + v) at v = 1 - u.

    arXiv:2403.03206, eq. 20; increasing in u for s in -1..2/(pi-2).
    """
    v = 1.0 - u
    return 1.0 - v - scale * (torch.cos(math.pi / 2 * v).square() - 1.0 + v)


def cosmap(u: Tensor) -> Tensor:
    """A rectified flow's timesteps for the cosine schedule of Nichol & Dhariwal: 1 - 1 / (tan(pi*u/2) + 1).

    arXiv:2403.03206, eq. 21.
    """
    return 1.0 - 1.0 / (torch.tan(math.pi / 2 * u) + 1.0)


SIGMAS: Mapping[str, Callable[[Tensor, ObjectiveConfig], Tensor]] = {
    "uniform": lambda u, config: u,
    "logit-normal": lambda u, config: logit_normal(u, mean=config.mean, std=config.std),
    "sigmoid": lambda u, config: logit_normal(u, std=config.std),
    "mode": lambda u, config: mode(u, scale=config.mode_scale),
    "cosmap": lambda u, config: cosmap(u),
    "schedule": lambda u, config: u,
}
"""Name -> quantile function: u uniform in (0, 1) -> timestep before the shift. "schedule" reads even a flow
model's timesteps as places in its own, already shifted schedule, as those of every other model always are."""

RESOLUTION_SHIFTS: Mapping[str, Callable[[float, float], float]] = {
    "none": lambda shift, tokens: shift,
    "flux": lambda shift, tokens: flux_shift(tokens),
    "sd3": sd3_shift,
    "ltx": lambda shift, tokens: ltx_shift(tokens),
}
"""Name -> (shift, tokens) -> shift at that size. "flux" and "ltx" depend on the size alone."""
