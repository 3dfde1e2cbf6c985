"""The validation loss: one number for held-out images that compares between any two moments.

Sigmas and noise are fixed here, in code. Every sample is measured at the same nine sigmas with the same
noise, whatever the run's seed, so the losses of a base and of its LoRAs differ by the weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from . import rng
from .adapters.build import Adapter, restore_adapters
from .config import MemoryConfig, ObjectiveConfig
from .memory.placement import Placement
from .memory.plan import MemoryPlan, candidates
from .memory.precision import compute_dtype, compute_format
from .model import Batch, CaptionedSamples, Denoiser, OnProgress, Samples, Sampling, no_progress
from .objective.loss import check_sampling, loss_at, with_guidance
from .objective.sigmas import is_flow, to_sigmas
from .state import TrainState
from .user_error import UserError

TIMESTEPS = tuple(tenth / 10 for tenth in range(1, 10))
"""0 is the image, 1 pure noise: sigmas of flow models, places in the schedule of all others."""

FEW = TIMESTEPS[1::3]
"""Enough to compare the pictures of one dataset, in a third of the time."""

NOISE_SEED = 20240229

T = TypeVar("T")


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
    adapters = {}
    if state is not None:
        adapters = restore_adapters(denoiser.specs, state.adapter, state.weights, denoiser.device)
    measure = partial(held_out_loss, denoiser, samples, limit=limit, on_progress=on_progress)
    return _hold_and(measure, denoiser, memory or MemoryConfig(), adapters)


def sample_losses(
    denoiser: Denoiser, samples: CaptionedSamples, *, on_progress: OnProgress = no_progress
) -> list[tuple[float, float]]:
    """Return each sample's loss with its caption and with the empty one, at the same noise.

    Holds the model meanwhile. Raises UserError where nothing says how the empty caption is encoded.
    """

    @torch.no_grad()
    def measure() -> list[tuple[float, float]]:
        found = []
        for index in range(len(samples)):
            on_progress(index, len(samples), "measuring")
            batches = samples.sample(index), samples.sample_without_caption(index)
            own, empty = (sample_loss(denoiser, batch, index, timesteps=FEW) for batch in batches)
            found.append((own, empty))
        return found

    return _hold_and(measure, denoiser, MemoryConfig(), {})


def _hold_and(
    measure: Callable[[], T], denoiser: Denoiser, memory: MemoryConfig, adapters: Mapping[str, Adapter]
) -> T:
    """Return what `measure` does while the base is held, offloaded if it does not fit."""
    check_sampling(denoiser.sampling, denoiser.family.name)
    compute = compute_format(memory, denoiser)
    bases = dict.fromkeys(plan.base for plan in candidates(memory, compute))
    plans = [MemoryPlan(base, "none", compute=compute) for base in bases]
    with Placement(denoiser, adapters, plans, compute_dtype(memory, denoiser)) as placement:
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


def sample_loss(
    denoiser: Denoiser,
    batch: Batch,
    index: int,
    guidance: float = -1.0,
    timesteps: Sequence[float] = TIMESTEPS,
) -> float:
    """Return the mean loss of sample `index` over all timesteps. `batch` is the sample, counted in full.

    The sigmas come one by one, which takes less memory than any training step.
    """
    device = denoiser.device
    config = ObjectiveConfig(guidance=guidance)
    batch = with_guidance(replace(batch, weights=None), config, denoiser.family)
    x0 = denoiser.scale_latents(batch.latents.to(device, torch.float32))
    noise = torch.randn(x0.shape, generator=rng.generator(NOISE_SEED, "validation", index)).to(device)
    sigmas = validation_sigmas(denoiser.sampling, timesteps).to(device)
    losses = [loss_at(denoiser, batch, x0, sigma[None], noise) for sigma in sigmas]
    return torch.stack(losses).mean().item()


def validation_sigmas(sampling: Sampling, timesteps: Sequence[float] = TIMESTEPS) -> Tensor:
    """Return the model's sigmas at timesteps."""
    return to_sigmas(sampling, torch.tensor(timesteps), flow=is_flow(sampling))
