"""The noise added to images: Gaussian, or variants for very dark, very bright or large-scale content."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import ObjectiveConfig

Draw = Callable[[str], torch.Generator]
"""draw(purpose) -> the generator of this micro-batch for one purpose."""


def draw_noise(shape: torch.Size, config: ObjectiveConfig, draw: Draw) -> Tensor:
    """Draw noise (B, C, H, W), with the offset and the coarser layers that `config` asks for."""
    noise = torch.randn(shape, generator=draw("noise"))
    if config.pyramid_noise:
        noise = add_pyramid(noise, config.pyramid_noise, generator=draw("pyramid"))
    if config.noise_offset:
        noise = add_offset(noise, config.noise_offset, generator=draw("offset"))
    return noise


def add_offset(noise: Tensor, strength: float, *, generator: torch.Generator) -> Tensor:
    """Add one normal value for each sample and channel: noise + strength * N(0, 1).

    N. Guttenberg 2023, "Diffusion with offset noise" (crosslabs.org).
    """
    return noise + strength * torch.randn(*noise.shape[:2], *(1,) * (noise.ndim - 2), generator=generator)


def add_pyramid(noise: Tensor, discount: float, *, generator: torch.Generator) -> Tensor:
    """Add ever coarser noise, layer i at strength discount**i; scale each sample back to unit variance.

    Each layer is 2 to 4 times as coarse as the one before, at random (J. Whitaker 2023, "Multi-resolution
    noise for diffusion model training").
    """
    height, width = noise.shape[-2:]
    total, side, strength = noise.clone(), 1.0, 1.0
    while min(height, width) / side > 1:
        side *= 2.0 + 2.0 * torch.rand((), generator=generator).item()
        strength *= discount
        size = (max(1, round(height / side)), max(1, round(width / side)))
        coarse = torch.randn(*noise.shape[:-2], *size, generator=generator)
        flat = coarse.reshape(-1, 1, *size)
        total += strength * F.interpolate(flat, size=(height, width), mode="bilinear").reshape(noise.shape)
    return total / total.flatten(1).std(1).reshape(-1, *(1,) * (noise.ndim - 1))
