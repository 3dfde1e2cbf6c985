"""A moving average of the adapter's weights: average = d * average + (1 - d) * weights after every step.

The share d rises with the step as 1 - (1 + step) ** -power up to its limit, so that an average of few steps
does not remember the first, untrained ones (as in huggingface/diffusers, training_utils.EMAModel).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import EmaConfig


def decay_at(config: EmaConfig, step: int) -> float:
    """Return the share of the average that is kept at `step`, counted from 0."""
    return min(config.decay, 1.0 - math.pow(1 + step, -config.power))


def start_ema(
    config: EmaConfig, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the average in `saved`, beside the weights and in float32; a run without one starts from them.

    Empty when the configuration keeps no average.
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
    """Move `average` towards `weights` in place, after step number `step`; an empty average stays empty."""
    if average:
        new = [weights[name].detach().float() for name in average]
        torch._foreach_lerp_(list(average.values()), new, 1.0 - decay_at(config, step))
