"""Preservation: the LoRA is held to the base at captions that don't name what is learned.

Without pictures: the base's own output is the target, at the x_t and sigma of the training step. Sources:
ostris/ai-toolkit, "differential output preservation" and "blank prompt preservation"; OneTrainer, "prior
prediction".
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..adapters.strength import at_strength
from ..config import ObjectiveConfig
from ..model import Batch, Denoiser
from .loss import compare, noise_input, predict


def is_due(config: ObjectiveConfig, step: int) -> bool:
    """Return whether a step, counted from 0, has preservation: a share of all, evenly spread."""
    share = config.preservation_share
    return config.preservation > 0 and math.floor((step + 1) * share) > math.floor(step * share)


def preservation_weight(config: ObjectiveConfig) -> float:
    """Return the weight of the loss where it is due: with a smaller share of the steps it counts more."""
    return config.preservation / config.preservation_share


def preservation_at(
    denoiser: Denoiser,
    batch: Batch,
    x0: Tensor,
    sigma: Tensor,
    noise: Tensor,
    config: ObjectiveConfig,
    *,
    perturbation: Tensor | None = None,
) -> Tensor:
    """Return the mean loss of the adapted output against the base's at `batch.preserved`, a scalar.

    Masks and weights of images don't count: everything is to stay as it is. Gradients go through the adapted
    pass alone. Arguments are those of `loss_at`.
    """
    assert batch.preserved is not None, "parts_of asks where they are"
    batch = replace(batch.with_captions(batch.preserved), masks=None, weights=None)
    x_t = noise_input(denoiser.sampling, batch, sigma, noise, x0, config, perturbation)
    with torch.no_grad(), at_strength(0):
        target = predict(denoiser, batch, x_t, sigma)
    return compare(denoiser, batch, sigma, predict(denoiser, batch, x_t, sigma), target, config)
