"""A moving average of the adapter's weights: average = d * average + (1 - d) * weights after every step.

The decay d rises with the step as 1 - (1 + step) ** -power up to its limit, so that an average of few steps
forgets the first, untrained ones (as in huggingface/diffusers, training_utils.EMAModel).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import EmaConfig


def decay_at(config: EmaConfig, step: int) -> float:
    """Return the decay d at `step`, counted from 0."""
    return min(config.decay, 1.0 - math.pow(1 + step, -config.power))


def start_ema(
    config: EmaConfig, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the saved average in float32 on the weights' device; a weight without one starts from itself.

    Empty when the settings ask for no average.
    """
    if not config.decay:
        return {}
    return {
        name: saved.get(name, weight).detach().to(weight.device, torch.float32, copy=True)
        for name, weight in weights.items()
    }


@torch.no_grad()
def update_ema(
    config: EmaConfig, average: Mapping[str, Tensor], weights: Mapping[str, Tensor], step: int
) -> None:
    """Move `average` towards `weights` in place, after `step`, counted from 0; an empty one stays empty."""
    if average:
        new = [weights[name].detach().float() for name in average]
        torch._foreach_lerp_(list(average.values()), new, 1.0 - decay_at(config, step))
