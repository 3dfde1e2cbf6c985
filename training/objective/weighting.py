"""The loss of an error: the space it is measured in, its shape, and its weight at each sigma.

What a sigma means is measured on the model's own `model_sampling` (`Level`), so one formula serves every
model type, and a weight means the same whatever the network predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import ObjectiveConfig
from ..model import Sampling


@dataclass(frozen=True)
class Level:
    """The parts of x_t at a sigma, and how the network's output enters the image; each (B, 1, 1, 1)."""

    image: Tensor
    """x_t = image * x0 ..."""
    noise: Tensor
    """... + noise * n."""
    slope: Tensor
    """d denoised / d output: -sigma for eps and flow models."""

    @classmethod
    def of(cls, sampling: Sampling, sigma: Tensor, ndim: int) -> Level:
        at = column(sigma.float(), ndim)
        zero, one = torch.zeros_like(at), torch.ones_like(at)
        image = sampling.noise_scaling(at, zero.clone(), one)
        noise = sampling.noise_scaling(at, one.clone(), zero)
        return cls(image, noise, output_slope(sampling, sigma, ndim))

    @property
    def snr(self) -> Tensor:
        """The signal-to-noise ratio of x_t; 0 for pure noise."""
        return (self.image / self.noise).square()

    @property
    def flow(self) -> Tensor:
        """The rectified-flow time with this signal-to-noise ratio, in 0..1."""
        return self.noise / (self.image + self.noise)


def output_slope(sampling: Sampling, sigma: Tensor, ndim: int) -> Tensor:
    """Return d denoised / d output, (B, 1, 1, 1), measured at x_t = 0, where it is exact."""
    zero = torch.zeros_like(column(sigma.float(), ndim))
    at = partial(sampling.calculate_denoised, sigma)
    return at(torch.ones_like(zero), zero) - at(zero, zero)


def column(sigma: Tensor, ndim: int) -> Tensor:
    """Return sigma (B,) as (B, 1, 1, 1), for latents of `ndim` dimensions."""
    return sigma.reshape(-1, *(1,) * (ndim - 1))


def huber(error: Tensor, delta: float) -> Tensor:
    """e^2 up to |e| = delta, then 2 * delta * |e| - delta^2 (Huber 1964, doubled: mse for small e)."""
    return 2.0 * F.huber_loss(error, torch.zeros_like(error), delta=delta, reduction="none")


def pseudo_huber(error: Tensor, delta: float) -> Tensor:
    """2 * delta * (sqrt(e^2 + delta^2) - delta): the smooth Huber loss (Song & Dhariwal 2023,
    arXiv:2310.14189, eq. 8)."""
    return 2.0 * delta * ((error.square() + delta**2).sqrt() - delta)


def min_snr(level: Level, gain: Tensor, config: ObjectiveConfig) -> Tensor:
    """min(SNR, gamma) on the image's squared error, in any space: over SNR for eps, over SNR + 1 for v.

    Hang et al. 2023, arXiv:2303.09556, sec. 3.4.
    """
    return level.snr.clamp(max=config.min_snr_gamma) * (level.slope / gain).square()


def debiased(level: Level, gain: Tensor, config: ObjectiveConfig) -> Tensor:
    """1 / sqrt(SNR) on the noise's squared error, in any space (Yu et al. 2023, arXiv:2310.08442).

    SNR is clamped to 1e-3..1e3, so that neither end of the schedule outweighs the rest.
    """
    return level.snr.clamp(1e-3, 1e3).sqrt() * (level.slope / gain).square()


LOSSES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "mse": lambda error, delta: error.square(),
    "l1": lambda error, delta: error.abs(),
    "huber": huber,
    "pseudo-huber": pseudo_huber,
}
"""Name -> (error, delta) -> loss of each element."""

SPACES: Mapping[str, Callable[[Level], Tensor]] = {
    "output": lambda level: torch.ones_like(level.slope),
    "x0": lambda level: level.slope.abs(),
    "eps": lambda level: level.slope.abs() * level.image / level.noise,
    "v": lambda level: level.slope.abs() * (level.image.square() + level.noise.square()).sqrt() / level.noise,
    "velocity": lambda level: level.slope.abs() * (level.image + level.noise) / level.noise,
}
"""Name -> factor that turns an error of the network's output into one of the image x0, the noise eps, v of
Salimans & Ho 2022 (arXiv:2202.00512) or the velocity eps - x0, at the same x_t. "output" leaves it."""


WEIGHTINGS: Mapping[str, Callable[[Level, Tensor, ObjectiveConfig], Tensor]] = {
    "none": lambda level, gain, config: torch.ones_like(level.slope),
    "min-snr": min_snr,
    "debiased": debiased,
    "sigma-sqrt": lambda level, gain, config: level.flow.clamp_min(1e-2) ** -2,
    "cosmap": lambda level, gain, config: (
        2.0 / (torch.pi * (1.0 - 2.0 * level.flow + 2.0 * level.flow.square()))
    ),
}
"""Name -> weight of the loss at a sigma. "sigma-sqrt" (t^-2) and "cosmap" (2 / (pi * (1 - 2t + 2t^2)),
arXiv:2403.03206, sec. 3.1) weight the error in the chosen space, at flow time t; the others give the same
weight whatever the space."""
