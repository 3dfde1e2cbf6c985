"""The table of memory plans on this device, corrected by one measured step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..adapters.build import build_adapters, draws, named_parameters
from ..adapters.strength import at_strength
from ..config import TrainConfig
from ..frozen_base.frozen_layer import LayerSpec
from ..model import Batch, Denoiser
from ..objective.parts import parts_of
from ..user_error import UserError
from .device_memory import measure_peak, synchronize
from .placement import Placement, refuse_undifferentiable
from .plan import Estimate, MemoryPlan, budget_of, gib, make_estimator, plans_that_fit
from .precision import compute_dtype

BANDWIDTH = 20e9
"""Bytes a second from host memory to the device: PCIe 4 with 16 lanes in practice."""


@dataclass(frozen=True)
class Probe:
    """A measured step of one micro-batch."""

    plan: MemoryPlan
    """The plan that it was computed by: the fastest that fits."""
    peak: int
    """Peak bytes of the device, without the weights of base and adapters."""
    seconds: float


def tabulate_plans(
    denoiser: Denoiser,
    adapted: Mapping[str, LayerSpec],
    config: TrainConfig,
    batch: Batch,
    plans: Sequence[MemoryPlan],
) -> str:
    """Return the table of `plans` for this device, with its current free memory and speed.

    Raises UserError for a network that cannot be trained or whose memory cannot be estimated.
    """
    budget = budget_of(denoiser, config.memory)
    estimate = make_estimator(denoiser, adapted, config, batch)
    try:
        estimates = [estimate(plan) for plan in plans]
    except (RuntimeError, NotImplementedError) as error:
        refuse_undifferentiable(error, denoiser.family.name)
        raise UserError(
            f"the memory of {denoiser.family.name} cannot be estimated ({error}); Train Steps starts with "
            "the fastest plan and goes on with the next one when memory runs out."
        ) from error
    fits = plans_that_fit(denoiser, adapted, config, batch, budget, estimate)
    measured = probe(denoiser, adapted, config, batch, fits)
    expected = estimate(measured.plan).step
    estimates = [replace(e, correction=measured.peak / expected.peak) for e in estimates]
    lines = [
        format_plans(estimates, budget, expected.flops / measured.seconds, BANDWIDTH),
        f"measured with {measured.plan}: a step takes {gib(measured.peak)} and {measured.seconds:.3g} s",
        *([] if budget is None else [f"{gib(budget)} of memory to use"]),
    ]
    return "\n".join(lines)


def format_plans(
    estimates: Sequence[Estimate], budget: int | None, flops: float | None, bandwidth: float
) -> str:
    """Return the plans as a table, one a line: device and host memory, time of a step, and whether it fits.

    Without `flops` (operations a second of the device), times are multiples of the fastest plan's. For a base
    that is offloaded or streamed, sizes are the least it takes, and times those with as many blocks on the
    device as fit; a streamed one must be read from its file that fast.
    """
    rows: list[tuple[str, ...]] = [
        ("base", "checkpointing", "compute", "weights", "adapters", "step", "peak", "host", "time", "")
    ]
    fastest = min(e.step.flops for e in estimates) or 1
    for e in estimates:
        relative = f"x {e.step.flops / fastest:.2f}"
        time = relative if flops is None else f"{e.seconds(flops, bandwidth, budget):.3g} s"
        fits = "" if budget is None else "fits" if e.fits(budget) else "too large"
        if e.plan.base == "stream":
            moved = e.moved(budget)
            rate = gib(moved) + " a step" if flops is None else gib(int(e.read_rate(flops, budget))) + "/s"
            fits = ", ".join(filter(None, (fits, f"reads {rate}")))
        sizes = (gib(size) if size else "-" for size in (e.weights, e.adapters, e.step_peak, e.peak, e.host))
        rows.append((e.plan.base, e.plan.checkpointing, e.plan.compute, *sizes, time, fits))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


@torch.enable_grad()
def probe(
    denoiser: Denoiser,
    adapted: Mapping[str, LayerSpec],
    config: TrainConfig,
    batch: Batch,
    plans: Sequence[MemoryPlan],
) -> Probe:
    """Measure memory and time of a forward and backward pass over `batch`; nothing is trained.

    Plans are tried in order. Raises UserError when memory runs out in all of them.
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
        for part in parts_of(batch, config.objective):
            with draws(0, 0), at_strength(part.strength):
                loss = part.compute(denoiser, batch, x0, sigma, torch.ones_like(x0), config.objective)
                loss.backward()  # type: ignore[no-untyped-call]

    with Placement(denoiser, adapters, plans, dtype) as placement:
        peak = placement.retry(lambda: measure_peak(step, denoiser.device))
        seconds = placement.retry(lambda: _seconds(step, denoiser.device))
        return Probe(placement.plan, peak, seconds)


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - began
