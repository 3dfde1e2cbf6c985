"""Sliders: at strength 1 the LoRA does one thing, at -1 the opposite, at 0 nothing.

From words, the target is base(neutral) + strength * guidance * (base(positive) - base(negative)): LECO and
"Concept Sliders" (Gandikota et al. 2023, arXiv:2311.12092, eq. 8), both ends as in ostris/ai-toolkit's
concept_slider. From pairs of pictures, each end is learned at its strength, at the same noise and sigma
("visual sliders", sec. 4.2 there).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..adapters.strength import at_strength
from ..config import ObjectiveConfig
from ..model import Batch, Denoiser
from .loss import compare, loss_at, noise_input, predict, with_guidance

ENDS = (1.0, -1.0)
"""Strengths at which a slider is trained."""


class SliderLoss:
    """The loss of a slider from words at one micro-batch: the base's outputs serve both ends."""

    def __init__(self) -> None:
        self._base: tuple[Tensor, Tensor] | None = None

    def at(
        self,
        strength: float,
        denoiser: Denoiser,
        batch: Batch,
        x0: Tensor,
        sigma: Tensor,
        noise: Tensor,
        config: ObjectiveConfig,
        *,
        perturbation: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss at an end, a scalar. The other arguments are those of `loss_at`."""
        assert batch.slider is not None, "parts_of asks where there is one"
        x_t = noise_input(denoiser.sampling, batch, sigma, noise, x0, config, perturbation)
        if self._base is None:
            self._base = base_outputs(denoiser, batch, x_t, sigma)
        neutral, direction = self._base
        batch = batch.with_captions(batch.slider.neutral)
        output = predict(denoiser, batch, x_t, sigma)
        return compare(denoiser, batch, sigma, output, neutral + strength * direction, config)


def base_outputs(denoiser: Denoiser, batch: Batch, x_t: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the base's output at the neutral text, and the way from there to strength 1."""
    texts = batch.slider
    assert texts is not None
    with torch.no_grad(), at_strength(0):
        positive, negative, neutral = (
            predict(denoiser, batch.with_captions(captions), x_t, sigma)
            for captions in (texts.positive, texts.negative, texts.neutral)
        )
    return neutral, texts.guidance * (positive - negative)


def opposite_at(
    denoiser: Denoiser,
    batch: Batch,
    x0: Tensor,
    sigma: Tensor,
    noise: Tensor,
    config: ObjectiveConfig,
    *,
    perturbation: Tensor | None = None,
) -> Tensor:
    """Return the mean loss of the other ends' pictures, at the noise and sigma of their pairs.

    Arguments are those of `loss_at`; the image x0 is that of the other end instead.
    """
    other = batch.opposite
    assert other is not None, "parts_of asks where there is one"
    x0 = denoiser.scale_latents(other.latents.to(x0.device, torch.float32))
    other = with_guidance(other, config, denoiser.family)
    return loss_at(denoiser, other, x0, sigma, noise, config, perturbation=perturbation)
