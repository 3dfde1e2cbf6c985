"""The table of all plans on the device at hand, corrected by one step that is really computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..adapters.build import build_adapters, draws, named_parameters
from ..config import TrainConfig
from ..model import Batch, Denoiser
from ..network.frozen_layer import LayerSpec
from ..objective.loss import loss_at
from ..user_error import UserError
from .device_memory import peak_of, wait
from .placement import Placement, refuse_undifferentiable
from .plan import Plan, budget_of, fitting, gib, predictor, table
from .precision import compute_dtype

BANDWIDTH = 20e9
"""Bytes a second from host memory to the device, as PCIe 4 with 16 lanes gives in practice."""


@dataclass(frozen=True)
class Probe:
    """One step of one micro-batch, measured."""

    plan: Plan
    """By which it was computed: the fastest that fits."""
    peak: int
    """Bytes of the device at the worst moment, beyond the weights of base and adapters."""
    seconds: float


def outlook(
    denoiser: Denoiser,
    adapted: Mapping[str, LayerSpec],
    config: TrainConfig,
    batch: Batch,
    plans: Sequence[Plan],
) -> str:
    """Return the table of `plans` on this device, as free and as fast as it is now.

    Raises UserError for a network that cannot be trained or whose memory cannot be foreseen.
    """
    budget = budget_of(denoiser, config.memory)
    predict = predictor(denoiser, adapted, config, batch)
    try:
        found = [predict(plan) for plan in plans]
    except (RuntimeError, NotImplementedError) as error:
        refuse_undifferentiable(error, denoiser.family.name)
        raise UserError(
            f"the memory of {denoiser.family.name} cannot be foreseen ({error}); Train Steps starts with the "
            "fastest plan and goes on with the next one when memory runs out."
        ) from error
    fits = fitting(denoiser, adapted, config, batch, budget, predict)
    measured = probe(denoiser, adapted, config, batch, fits)
    foreseen = predict(measured.plan).step
    found = [replace(p, correction=measured.peak / foreseen.peak) for p in found]
    lines = [
        table(found, budget, foreseen.flops / measured.seconds, BANDWIDTH),
        f"measured with {measured.plan}: a step takes {gib(measured.peak)} and {measured.seconds:.3g} s",
        *([] if budget is None else [f"{gib(budget)} of memory to use"]),
    ]
    return "\n".join(lines)


@torch.inference_mode(False)
@torch.enable_grad()
def probe(
    denoiser: Denoiser,
    adapted: Mapping[str, LayerSpec],
    config: TrainConfig,
    batch: Batch,
    plans: Sequence[Plan],
) -> Probe:
    """Compute the forward and backward pass of `batch` twice, to see what they take and how long they last.

    Nothing is trained. Raises UserError when memory runs out in every one of `plans`, tried in their order.
    """
    dtype = compute_dtype(config.memory, denoiser)
    adapters = {p: a.to(denoiser.device) for p, a in build_adapters(adapted, config.adapter).items()}
    parameters = named_parameters(adapters)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    x0 = torch.zeros(batch.latents.shape, device=denoiser.device)
    sigma = torch.full((len(x0),), 0.5, device=denoiser.device)

    def step() -> None:
        for parameter in parameters.values():
            parameter.grad = None
        with draws(0, 0):
            loss_at(denoiser, batch, x0, sigma, torch.ones_like(x0)).backward()  # type: ignore[no-untyped-call]

    with Placement(denoiser, adapters, plans, dtype) as placement:
        peak = placement.retrying(lambda: peak_of(step, denoiser.device))
        seconds = placement.retrying(lambda: _seconds(step, denoiser.device))
        return Probe(placement.plan, peak, seconds)


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - began
