"""The validation loss: one number for held-out images that compares between any two moments.

Sigmas and noise are fixed here, in code. Every sample is measured at the same nine sigmas with the same
noise, whatever the run's seed, so the losses of a base and of its LoRAs differ by the weights alone.
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

TIMESTEPS = tuple(tenth / 10 for tenth in range(1, 10))
"""0 is the image, 1 pure noise: sigmas of flow models, places in the schedule of all others."""

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
    """Return the mean loss over `samples` of the base model, or of the base with the adapter of `state`.

    Holds the base meanwhile, offloaded if it does not fit. A `limit` above 0 measures that many samples,
    evenly spread. Raises UserError if there are no samples, or if `state` belongs to other layers.
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
    """Return the mean loss over `samples` of the denoiser as it is; its base must be held.

    `guidance` is the network's input of that name, if it has one; -1 is the family's value.
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
    """Return the mean loss of sample `index` over all sigmas. `batch` is the sample, counted in full.

    The sigmas come one by one, which takes less memory than any training step.
    """
    device = denoiser.device
    config = ObjectiveConfig(guidance=guidance)
    batch = with_guidance(replace(batch, weights=None), config, denoiser.family)
    x0 = denoiser.scale_latents(batch.latents.to(device, torch.float32))
    noise = torch.randn(x0.shape, generator=rng.generator(NOISE_SEED, "validation", index)).to(device)
    sigmas = validation_sigmas(denoiser.sampling).to(device)
    losses = [loss_at(denoiser, batch, x0, sigma[None], noise) for sigma in sigmas]
    return torch.stack(losses).mean().item()


def validation_sigmas(sampling: Sampling) -> Tensor:
    """Return the model's sigmas at `TIMESTEPS`."""
    return to_sigmas(sampling, torch.tensor(TIMESTEPS), flow=is_flow(sampling))
