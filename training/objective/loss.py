"""The loss: the error of the network's output at a random sigma.

Sigma is the only noise coordinate, and the target comes from the model's own `model_sampling`:
`calculate_denoised` is affine in the network's output, denoised = D0 + slope * output, so
    output(denoised) = (denoised - D0) / slope        target = output(x0)
which is the noise for eps models, the velocity for flow and v models, and right for every type that ComfyUI
adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from .. import rng
from ..config import ObjectiveConfig
from ..family import Family
from ..model import Batch, Denoiser, Sampling
from ..user_error import UserError
from .noise import Draw, draw_noise
from .settled import settled
from .sigmas import draw_sigmas
from .weighting import LOSSES, SPACES, WEIGHTINGS, Level, column, output_slope

LossAt = Callable[..., Tensor]
"""Called as `loss_at` is."""


def draw_loss(
    denoiser: Denoiser,
    batch: Batch,
    config: ObjectiveConfig,
    *,
    seed: int,
    index: int,
    compute: LossAt | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw sigmas and noise for micro-batch `index`; return its mean loss (a differentiable scalar) and the
    sigmas (B,).

    `compute` is the part of the loss, `loss_at` if None; all parts get the same draws.
    """
    device, family = denoiser.device, denoiser.family
    draw: Draw = partial(rng.generator, seed, index)
    x0 = denoiser.scale_latents(batch.latents.to(device, torch.float32))
    sigma = draw_sigmas(
        len(x0), config, family, denoiser.sampling, generator=draw("sigma"), tokens=family.tokens(x0.shape)
    ).to(device)
    noise = draw_noise(x0.shape, config, draw).to(device)
    extra = torch.randn(x0.shape, generator=draw("perturbation")) if config.input_perturbation else None
    batch = with_guidance(batch, config, family)
    return (compute or loss_at)(denoiser, batch, x0, sigma, noise, config, perturbation=extra), sigma


def loss_at(
    denoiser: Denoiser,
    batch: Batch,
    x0: Tensor,
    sigma: Tensor,
    noise: Tensor,
    config: ObjectiveConfig = ObjectiveConfig(),  # noqa: B008 - frozen
    *,
    perturbation: Tensor | None = None,
) -> Tensor:
    """Return the mean loss at `sigma` (B,), a scalar.

    x0 and noise are (B, C, H, W) float32, x0 scaled for the model. `perturbation` is more noise, which enters
    x_t, times `config.input_perturbation`, but not the target (Ning et al. 2023, arXiv:2301.11706, alg. 1).
    """
    sampling = denoiser.sampling
    _, target = add_noise(sampling, sigma, noise, x0)
    x_t = noise_input(sampling, batch, sigma, noise, x0, config, perturbation)
    output = predict(denoiser, batch, x_t, sigma)
    if config.differential_guidance != 1.0:
        target = differential_target(output.detach(), target, config.differential_guidance)
    return compare(denoiser, batch, sigma, output, target, config)


def compare(
    denoiser: Denoiser, batch: Batch, sigma: Tensor, output: Tensor, target: Tensor, config: ObjectiveConfig
) -> Tensor:
    """Return the mean loss of the network's `output` against a target for it, both (B, C, H, W)."""
    level = Level.of(denoiser.sampling, sigma, output.ndim)
    gain = _choice(SPACES, settled(config, denoiser.family).space, "space")(level)
    error = _choice(LOSSES, config.loss, "loss")(gain * (output - target), config.huber_delta)
    error = error * _choice(WEIGHTINGS, config.weighting, "weighting")(level, gain, config)
    return _mean(error, batch, noised_mask(batch, output))


def noised_mask(batch: Batch, latents: Tensor) -> Tensor | None:
    """Return (B, 1, T, H, W) or what broadcasts to it: 1 where latents are noised and trained, 0 where the
    model is given them clean, by the "denoise_mask" of each sample. None if no sample has one.

    `latents` are (B, C, T, H, W).
    """
    masks = [conditioning.get("denoise_mask") for conditioning in batch.conditioning]
    if not any(isinstance(mask, Tensor) for mask in masks):
        return None
    one = torch.ones(1, 1, *latents.shape[2:], device=latents.device)
    return torch.cat([one * mask.to(one) if isinstance(mask, Tensor) else one for mask in masks])


def predict(denoiser: Denoiser, batch: Batch, x_t: Tensor, sigma: Tensor) -> Tensor:
    """Return the network's own output at x_t (B, C, H, W) for the captions of the batch."""
    return network_output(denoiser.sampling, sigma, x_t, denoiser.denoise(x_t, sigma, batch))


def noise_input(
    sampling: Sampling,
    batch: Batch,
    sigma: Tensor,
    noise: Tensor,
    x0: Tensor,
    config: ObjectiveConfig,
    perturbation: Tensor | None,
) -> Tensor:
    """Return x_t at `sigma` (B,): with the extra noise that the target ignores, if there is any, and without
    noise where the model is given the latents.
    """
    if perturbation is not None:
        noise = noise + config.input_perturbation * perturbation.to(noise)
    x_t = add_noise(sampling, sigma, noise, x0)[0]
    noised = noised_mask(batch, x0)
    return x_t if noised is None else torch.where(noised > 0, x_t, x0)


def add_noise(sampling: Sampling, sigma: Tensor, noise: Tensor, x0: Tensor) -> tuple[Tensor, Tensor]:
    """Return x_t at `sigma` (B,) and the network output that would denoise it to x0 exactly."""
    x_t = sampling.noise_scaling(column(sigma, x0.ndim), noise.clone(), x0)
    return x_t, network_output(sampling, sigma, x_t, x0)


def network_output(sampling: Sampling, sigma: Tensor, x_t: Tensor, denoised: Tensor) -> Tensor:
    """Return the network output for which `calculate_denoised` gives `denoised`; differentiable in that."""
    d0 = sampling.calculate_denoised(sigma, torch.zeros_like(x_t), x_t)
    return (denoised - d0) / output_slope(sampling, sigma, x_t.ndim)


def check_sampling(sampling: Sampling, name: str) -> None:
    """Raise UserError when the model cannot be trained through its `model_sampling`: the noise does not enter
    x_t, or the output does not enter the denoised image.
    """
    sigma = torch.as_tensor(sampling.percent_to_sigma(0.5), dtype=torch.float32).reshape(1)
    level = Level.of(sampling, sigma, 4)
    if not bool((level.noise != 0).all()):
        raise UserError(
            f"{name} cannot be trained: its {type(sampling).__name__} ignores the noise, so there is "
            "nothing to denoise."
        )
    if not bool((level.slope != 0).all()) or not bool(torch.isfinite(level.slope).all()):
        raise UserError(
            f"{name} cannot be trained: in its {type(sampling).__name__} the network's output does not "
            "decide the image."
        )


def differential_target(output: Tensor, target: Tensor, scale: float) -> Tensor:
    """Return a target `scale` times as far from the output: output + scale * (target - output).

    ostris/ai-toolkit, "differential guidance". With a squared error this multiplies the gradient by `scale`.
    """
    return output + scale * (target - output)


def with_guidance(batch: Batch, config: ObjectiveConfig, family: Family) -> Batch:
    """Return the batch with the guidance input of the family's network, if it has one.

    Raises UserError when the settings name a guidance for a network without this input.
    """
    if family.guidance is None:
        if config.guidance >= 0:
            raise UserError(f"guidance: {family.name} has no such input that Graft knows; leave it at -1.")
        return batch
    value = config.guidance if config.guidance >= 0 else family.guidance
    extras = batch.extras or ({},) * len(batch.latents)
    return dataclasses.replace(batch, extras=[{"guidance": value, **extra} for extra in extras])


def _mean(error: Tensor, batch: Batch, noised: Tensor | None) -> Tensor:
    masks = noised
    if batch.masks is not None:
        painted = batch.masks.to(error)
        painted = painted.reshape(*painted.shape[:2], *(1,) * (error.ndim - 4), *painted.shape[2:])
        masks = painted if noised is None else painted * noised
    if masks is not None:
        means = masks.flatten(1).mean(1).clamp_min(1e-6)  # per image, so that all images count the same
        error = error * (masks / means.reshape(-1, *(1,) * (masks.ndim - 1)))
    per_sample = error.flatten(1).mean(1)
    if batch.weights is not None:
        per_sample = per_sample * batch.weights.to(per_sample)
    return per_sample.mean()


def _choice(table: Mapping[str, Callable[..., Tensor]], name: str, setting: str) -> Callable[..., Tensor]:
    if name not in table:
        raise UserError(f"{setting}: {name!r} is unknown; choose one of {', '.join(table)}.")
    return table[name]


__all__ = ["check_sampling", "draw_loss", "draw_sigmas", "loss_at", "network_output", "add_noise"]
