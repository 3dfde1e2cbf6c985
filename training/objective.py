"""What is learnt: the error of the network's output at a random noise level.

Sigma is the only noise coordinate and the target comes from the model's own `model_sampling`: `calculate_denoised` is
affine in the network's output, so with D0 and D1 its values for outputs 0 and 1
    output(denoised) = (D0 - denoised) / (D0 - D1)        target = output(x0)
which is noise for eps models, velocity for flow and v models, and right for every type ComfyUI adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from . import rng
from .config import ObjectiveConfig
from .family import Family
from .model import Batch, Denoiser, Sampling


def loss(
    denoiser: Denoiser, batch: Batch, config: ObjectiveConfig, *, seed: int, index: int
) -> tuple[Tensor, Tensor]:
    """Return the mean loss of micro-batch `index` (differentiable scalar) and its noise levels (B,)."""
    device = denoiser.device
    x0 = denoiser.scale_latents(batch.latents.to(device, torch.float32))
    sigma = draw_sigmas(
        len(x0), config, denoiser.family, denoiser.sampling, generator=rng.generator(seed, index, "sigma")
    ).to(device)
    noise = torch.randn(x0.shape, generator=rng.generator(seed, index, "noise")).to(device)
    return loss_at(denoiser, batch, x0, sigma, noise), sigma


def loss_at(denoiser: Denoiser, batch: Batch, x0: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
    """Return the mean squared error of the network's output at noise levels `sigma` (B,), a scalar.

    x0 and noise are (B, C, H, W) float32, x0 as scaled for the model.
    """
    x_t, target = noised(denoiser.sampling, sigma, noise, x0)
    output = network_output(denoiser.sampling, sigma, x_t, denoiser.denoise(x_t, sigma, batch))
    error = (output - target).square()
    if batch.masks is not None:
        masks = batch.masks.to(error)
        error = error * (masks / masks.mean().clamp_min(1e-6))
    per_sample = error.flatten(1).mean(1)
    if batch.weights is not None:
        per_sample = per_sample * batch.weights.to(per_sample)
    return per_sample.mean()


def noised(sampling: Sampling, sigma: Tensor, noise: Tensor, x0: Tensor) -> tuple[Tensor, Tensor]:
    """Return x_t at noise level `sigma` and the network output that would denoise it to x0 exactly."""
    x_t = sampling.noise_scaling(_column(sigma, x0), noise.clone(), x0)
    return x_t, network_output(sampling, sigma, x_t, x0)


def network_output(sampling: Sampling, sigma: Tensor, x_t: Tensor, denoised: Tensor) -> Tensor:
    """Return the network output for which `calculate_denoised` gives `denoised`; differentiable in `denoised`."""
    d0 = sampling.calculate_denoised(sigma, torch.zeros_like(x_t), x_t)
    d1 = sampling.calculate_denoised(sigma, torch.ones_like(x_t), x_t)
    return (d0 - denoised) / (d0 - d1)


def check_sampling(sampling: Sampling, name: str) -> None:
    """Raise ValueError when the model cannot be trained through its `model_sampling`.

    That is when noise does not enter x_t, or the output does not enter the denoised image.
    """
    sigma = torch.as_tensor(sampling.percent_to_sigma(0.5), dtype=torch.float32).reshape(1)
    zero, one = torch.zeros(1, 4, 2, 2), torch.ones(1, 4, 2, 2)
    x_t = sampling.noise_scaling(_column(sigma, zero), one.clone(), zero)
    if torch.equal(x_t, sampling.noise_scaling(_column(sigma, zero), zero.clone(), zero)):
        raise ValueError(
            f"{name} cannot be trained: its {type(sampling).__name__} ignores the noise, so there is nothing to denoise."
        )
    d0, d1 = (sampling.calculate_denoised(sigma, value, x_t) for value in (zero, one))
    if bool((d0 == d1).any()) or not bool(torch.isfinite(d0 - d1).all()):
        raise ValueError(
            f"{name} cannot be trained: in its {type(sampling).__name__} the network's output does not decide the image."
        )


def draw_sigmas(
    count: int, config: ObjectiveConfig, family: Family, sampling: Sampling, *, generator: torch.Generator
) -> Tensor:
    """Draw `count` noise levels, one from each of `count` equal parts of the distribution, in random order.

    Stratifying a batch lowers the variance of its loss and changes no expectation.

    Returns (count,) float32 within the model's own range. Raises ValueError for an unknown distribution.
    """
    name = family.sigmas if config.sigmas == "auto" else config.sigmas
    if name not in SIGMAS:
        raise ValueError(f"sigmas: {name!r} is unknown; choose one of auto, {', '.join(SIGMAS)}.")
    u = (torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)) / count
    u = u.clamp(1e-4, 1 - 1e-4)
    if name == "schedule":
        return torch.tensor([float(sampling.percent_to_sigma(1.0 - float(v))) for v in u])
    sigma = shifted(SIGMAS[name](u), config.shift or family.shift)
    return sigma.clamp(float(sampling.sigma_min), float(sampling.sigma_max))


def shifted(sigma: Tensor, shift: float) -> Tensor:
    """Move rectified-flow noise levels towards noise for shift > 1: shift*s / (1 + (shift-1)*s).

    Esser et al. 2024, arXiv:2403.03206, sec. 5.3.2.
    """
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def logit_normal(u: Tensor, *, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Quantile function of sigmoid(N(mean, std)): densest at medium noise (arXiv:2403.03206, sec. 3.1)."""
    return torch.sigmoid(mean + std * torch.special.ndtri(u))


SIGMAS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda u: u,
    "logit-normal": logit_normal,
    "schedule": lambda u: u,
}
"""Name -> quantile function (u uniform in 0..1 -> flow sigma before the shift). "schedule" takes the model's own
sigmas uniformly in time instead, for any model type."""


def _column(sigma: Tensor, like: Tensor) -> Tensor:
    return sigma.reshape(-1, *(1,) * (like.ndim - 1))
