"""How well a model denoises images it was not trained on: one number, comparable between any two moments.

Noise levels and noise are fixed here, in code: every sample is measured at the same nine levels with the same
noise, whatever the run's seed, so the figures of a base and of its LoRAs differ by the weights alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from . import rng
from .adapters.build import restore_adapters
from .config import MemoryConfig, ObjectiveConfig
from .memory.placement import Placement
from .memory.plan import MemoryPlan, candidates
from .memory.precision import compute_dtype
from .model import Batch, Denoiser, OnProgress, Samples, Sampling, no_progress
from .objective.loss import check_sampling, loss_at, with_guidance
from .objective.sigmas import is_flow, to_sigmas
from .state import TrainState
from .user_error import UserError

LEVELS = tuple(level / 10 for level in range(1, 10))
"""Sigmas of flow models; of others the fractions of their schedule, 0 at the image and 1 at pure noise."""

NOISE_SEED = 20240229


def validation_loss(
    denoiser: Denoiser,
    samples: Samples,
    memory: MemoryConfig | None = None,
    state: TrainState | None = None,
    *,
    limit: int = 0,
    on_progress: OnProgress = no_progress,
) -> float:
    """Return the mean loss of the base model over `samples`, or of the base with the adapter of `state`.

    Takes the base meanwhile, offloaded if it does not fit, and gives it back as it was. A `limit` above 0
    measures so many samples, evenly spread. Raises UserError without samples or for other layers' states.
    """
    check_sampling(denoiser.sampling, denoiser.family.name)
    memory = memory or MemoryConfig()
    plans = [MemoryPlan(base, "none") for base in dict.fromkeys(plan.base for plan in candidates(memory))]
    adapters = {}
    if state is not None:
        adapters = restore_adapters(denoiser.specs, state.adapter, state.weights, denoiser.device)
    measure = partial(held_out_loss, denoiser, samples, limit=limit, on_progress=on_progress)
    dtype = compute_dtype(memory, denoiser)
    with Placement(denoiser, adapters, plans, dtype) as placement:
        return placement.retry(measure)


@torch.no_grad()
def held_out_loss(
    denoiser: Denoiser,
    samples: Samples,
    *,
    guidance: float = -1.0,
    limit: int = 0,
    on_progress: OnProgress = no_progress,
) -> float:
    """Return the mean loss over `samples` of what the denoiser computes now, its base being held.

    `guidance` is the network's input of that name, where it has one; -1 is the family's.
    """
    count = len(samples)
    if count == 0:
        raise UserError("validation: the held-out dataset is empty; give it at least one image.")
    chosen = [i * count // limit for i in range(limit)] if 0 < limit < count else list(range(count))
    total = 0.0
    for done, index in enumerate(chosen):
        on_progress(done, len(chosen), "validation")
        total += sample_loss(denoiser, samples.sample(index), index, guidance)
    on_progress(len(chosen), len(chosen), "validation")
    return total / len(chosen)


def sample_loss(denoiser: Denoiser, batch: Batch, index: int, guidance: float = -1.0) -> float:
    """Return the mean loss of sample number `index`, a batch of one that counts fully, over all noise levels.

    One by one, which takes less memory than any training step.
    """
    device = denoiser.device
    given = ObjectiveConfig(guidance=guidance)
    batch = with_guidance(replace(batch, weights=None), given, denoiser.family)
    x0 = denoiser.scale_latents(batch.latents.to(device, torch.float32))
    noise = torch.randn(x0.shape, generator=rng.generator(NOISE_SEED, "validation", index)).to(device)
    levels = noise_levels(denoiser.sampling).to(device)
    losses = [loss_at(denoiser, batch, x0, level[None], noise) for level in levels]
    return torch.stack(losses).mean().item()


def noise_levels(sampling: Sampling) -> Tensor:
    """Return a model's sigmas at `LEVELS`: themselves for a flow model, else by the model's schedule."""
    return to_sigmas(sampling, torch.tensor(LEVELS), flow=is_flow(sampling))
