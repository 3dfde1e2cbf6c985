"""The memory plan: where the base's weights are and what a step recomputes. The fastest plan that fits is
chosen.

The peak of a plan is the base's weights on the device, the adapters with their optimizer state, and the step:
an estimate of its two passes (`estimate.py`), or the optimizer's part if that is larger. The plan decides
what the settings leave at "auto"; quantizing the base changes the result, so it is never chosen
automatically.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from .. import distributed
from ..adapters.build import build_adapters
from ..config import MemoryConfig, TrainConfig
from ..frozen_base.frozen_layer import LayerSpec
from ..log import log
from ..model import OFFLOAD_ALL, Batch, Denoiser, OffloadOptions, count_positions, tensors_in
from ..optimizer.build import row_of
from ..user_error import UserError
from .activation_checkpointing import MODES
from .estimate import StepEstimate, estimate_step
from .in_place import is_changed_in_place
from .known_estimates import KnownEstimates, estimate_key
from .precision import compute_dtype, compute_format
from .quantize import FORMATS
from .sharding import SHARDED
from .weight_store import (
    COPIED,
    EVERY_STORE,
    STORES,
    block_bytes,
    is_multiplied,
    is_quantized,
    layer_bytes,
    weight_bytes,
)

GIB = 1 << 30

RESERVE = 0.04
"""Share of the budget left free for memory outside tensors: the allocator's gaps, kernels' work space."""

UNFILLED = 0.1
"""Share of the budget that blocks of an offloaded base never fill."""


@dataclass(frozen=True)
class MemoryPlan:
    """One way to spend memory."""

    base: str
    """One of STORES."""
    checkpointing: str
    """One of activation_checkpointing.MODES."""
    offload: OffloadOptions = field(default=OFFLOAD_ALL, compare=False)
    compute: str = "full"
    """One of weight_store.COMPUTES."""

    def __str__(self) -> str:
        count = len(self.offload.blocks_on_device)
        there = f" with {count} {'block' if count == 1 else 'blocks'} on the device" if count else ""
        return f"base {self.base}{there}, checkpointing {self.checkpointing}{self._in_8_bits}"

    @property
    def short(self) -> str:
        return f"{self.base}, {self.checkpointing}{self._in_8_bits}"

    @property
    def _in_8_bits(self) -> str:
        return "" if self.compute == "full" else f", compute {self.compute}"


@dataclass(frozen=True)
class Estimate:
    """The memory of a plan: bytes on the device unless noted."""

    plan: MemoryPlan
    weights: int
    """Bytes of the base's weights."""
    adapters: int
    """Bytes of the trained weights, their average and their optimizer state."""
    step: StepEstimate
    optimizing: int = 0
    """Bytes of gradients and temporary tensors during the optimizer's step, after both passes."""
    host: int = 0
    """Bytes of host memory: the base's weights or the buffers that they pass, and block inputs."""
    blocks: Mapping[str, int] = field(default_factory=dict)
    """Block -> bytes copied to the device in each pass."""
    passes: int = 0
    """Passes through the blocks in a step, forward, backward and recomputing."""
    correction: float = 1.0
    """Measured peak of a step, divided by its estimate."""

    @property
    def peak(self) -> int:
        return self.weights + self.adapters + self.step_peak

    @property
    def step_peak(self) -> int:
        return max(int(self.step.peak * self.correction), self.optimizing)

    def fits(self, budget: int) -> bool:
        """Return whether the peak leaves the reserve of a budget in bytes."""
        return self.peak <= budget * (1 - RESERVE)

    def seconds(self, flops: float, bandwidth: float, budget: int | None = None) -> float:
        """Return the time of a step; `flops` and `bandwidth` (bytes) are per second, and copies overlap."""
        return max(self.step.flops / flops, self.moved(budget) / bandwidth)

    def read_rate(self, flops: float, budget: int | None = None) -> float:
        """Return the bytes a second that a file must give so that no step waits for it."""
        return self.moved(budget) * flops / self.step.flops

    def moved(self, budget: int | None = None) -> int:
        """Return the bytes copied to the device in a step."""
        stay = self.blocks_on_device(budget)
        return self.passes * sum(size for block, size in self.blocks.items() if block not in stay)

    def blocks_on_device(self, budget: int | None) -> frozenset[str]:
        """Return the blocks of an offloaded base that fit on the device within `budget`.

        They are spread evenly: while one of them computes, the next of the other blocks is copied.
        """
        spare = 0 if budget is None else budget * (1 - UNFILLED) - self.peak
        names = list(self.blocks)
        # As many as fit, counted down; block i stays wherever i * count / n reaches the next whole number.
        for count in range(len(names), 0, -1):
            reached = [i * count // len(names) for i in range(len(names) + 1)]
            chosen = [name for i, name in enumerate(names) if reached[i + 1] > reached[i]]
            if sum(self.blocks[name] for name in chosen) <= spare:
                return frozenset(chosen)
        return frozenset()


def candidates(
    config: MemoryConfig, compute: str = "full", *, is_mapped: bool = False
) -> Sequence[MemoryPlan]:
    """Return the plans that the settings allow, fastest first; all train to the same result.

    A base that `is_mapped` from its file, as host memory is too small for it, is streamed, not offloaded,
    unless it is in 8 bits then. `compute` is what `compute_format` makes of the setting.

    Raises UserError for unknown settings, and for a base that cannot be multiplied so.
    """
    for name, value, known in (
        ("base", config.base, EVERY_STORE),
        ("checkpointing", config.checkpointing, MODES),
    ):
        if value != "auto" and value not in known:
            raise UserError(f"{name}: {value!r} is unknown; choose one of auto, {', '.join(known)}.")
    if not _can_be_multiplied(config.base, compute):
        raise UserError(
            f"compute: {compute!r} multiplies weights that are stored as {compute}, and base is "
            f"{config.base!r}. In Memory Settings set base to 'auto', or compute to 'full'."
        )
    copied = "stream" if is_mapped and _can_be_multiplied("stream", compute) else "offload"
    bases = ("resident", copied) if config.base == "auto" else (config.base,)
    modes = tuple(MODES) if config.checkpointing == "auto" else (config.checkpointing,)
    return [MemoryPlan(base, mode, compute=compute) for base in bases for mode in modes]


def every_plan(compute: str = "full") -> Sequence[MemoryPlan]:
    """Return all plans, those that quantize the base included, with `compute` where the base allows it."""
    can = {base: compute if _can_be_multiplied(base, compute) else "full" for base in STORES}
    return [MemoryPlan(base, mode, compute=can[base]) for base in STORES for mode in MODES]


def _can_be_multiplied(base: str, compute: str) -> bool:
    """Return whether weights that `base` keeps can be in the numbers that `compute` multiplies."""
    return compute not in FORMATS or base in ("auto", "resident", "offload", compute)


def budget_of(denoiser: Denoiser, config: MemoryConfig) -> int | None:
    """Return the bytes of the device that a run may take: the budget in the settings, or what is free after
    unloading everything else; None if unknown.
    """
    return int(config.budget_gb * GIB) if config.budget_gb else denoiser.free_bytes()


def is_limit_hard(config: MemoryConfig) -> bool:
    """Return whether the user set base, checkpointing and budget, so that no plan may exceed the budget."""
    return bool(config.budget_gb) and len(candidates(config)) == 1


def agree_on_plans(
    denoiser: Denoiser,
    adapted: Mapping[str, LayerSpec],
    config: TrainConfig,
    batch: Batch | None,
    budget: int | None,
) -> Sequence[MemoryPlan]:
    """Return `plans_that_fit`. Processes that hold a base together take one plan, for the smallest budget of
    theirs: none of them could go on with another plan on its own.
    """
    if config.memory.base != SHARDED:
        return plans_that_fit(denoiser, adapted, config, batch, budget)
    budget = distributed.take_smallest(budget)
    return plans_that_fit(denoiser, adapted, config, batch, budget)[:1]


def plans_that_fit(
    denoiser: Denoiser,
    adapted: Mapping[str, LayerSpec],
    config: TrainConfig,
    batch: Batch | None,
    budget: int | None,
    estimate: Callable[[MemoryPlan], Estimate] | None = None,
) -> Sequence[MemoryPlan]:
    """Return the candidates to try in this order, beginning with the fastest one that fits into `budget`.

    `batch` is one of the largest. All candidates are returned if it or the budget is None, or if the network
    cannot be estimated. `estimate` is a result of `make_estimator` that the caller may have.

    An offloaded base first keeps as many blocks on the device as fit; if memory runs out all the same, the
    plan is tried again without them.
    """
    compute = compute_format(config.memory, denoiser)
    plans = candidates(config.memory, compute, is_mapped=denoiser.is_mapped)
    # A single plan leaves no choice, unless its blocks can stay on the device or a budget must hold.
    matters = len(plans) > 1 or plans[0].base in COPIED or bool(config.memory.budget_gb)
    if (
        batch is None
        or budget is None
        or not matters
        or fits_surely(denoiser, adapted, config, batch, budget)
    ):
        return plans
    estimate = estimate or make_estimator(denoiser, adapted, config, batch)
    try:
        first = estimate_fastest(denoiser, config, plans, budget, estimate)
    except (RuntimeError, NotImplementedError) as error:
        log.warning("the memory of %s cannot be estimated (%s).", denoiser.family.name, error)
        return plans
    if first.fits(budget):
        log.info("%s takes %s of %s.", first.plan, gib(first.peak), gib(budget))
        # Those behind it are for when memory runs out all the same.
        left = reserve_host(plans[plans.index(first.plan) :], first.step)
        return [*fill_device(left[0], first, budget), *left]
    # Estimates may be too high: the smallest plan is tried all the same.
    log.warning(
        "no plan fits into %s%s; trying the one that takes least, %s (%s). Set base to 'auto', 'fp8' "
        "or 'nf4' in Memory Settings to take less.",
        *(gib(budget), " (budget gb)" if config.memory.budget_gb else "", plans[-1], gib(first.peak)),
    )
    return reserve_host(plans[-1:], first.step)


def estimate_fastest(
    denoiser: Denoiser,
    config: TrainConfig,
    plans: Sequence[MemoryPlan],
    budget: int,
    estimate: Callable[[MemoryPlan], Estimate],
) -> Estimate:
    """Return the estimate of the first of `plans` that fits into `budget`, of the last one if none does.

    Raises RuntimeError or NotImplementedError as `estimate` does.
    """
    dtype = compute_dtype(config.memory, denoiser)
    for plan in plans[:-1]:
        weights = weight_bytes(denoiser.specs, denoiser.family.blocks, plan.base, dtype, plan.compute)
        if weights <= budget and (found := estimate(plan)).fits(budget):
            return found  # no step is estimated where not even the base fits
    return estimate(plans[-1])


def reserve_host(plans: Sequence[MemoryPlan], step: StepEstimate) -> Sequence[MemoryPlan]:
    """Return the plans with host memory reserved for block inputs; `step` is of any checkpointing mode."""
    moves = "block-offload"
    return [replace(p, offload=OffloadOptions(step.host)) if p.checkpointing == moves else p for p in plans]


def fill_device(plan: MemoryPlan, estimate: Estimate, budget: int) -> Sequence[MemoryPlan]:
    """Return the plan with as many blocks on the device as fit; no plan if none fits."""
    blocks = estimate.blocks_on_device(budget)
    if not blocks:
        return []
    log.info("%d of %d blocks stay on the device.", len(blocks), len(estimate.blocks))
    return [replace(plan, offload=replace(plan.offload, blocks_on_device=blocks))]


def make_estimator(
    denoiser: Denoiser, adapted: Mapping[str, LayerSpec], config: TrainConfig, batch: Batch
) -> Callable[[MemoryPlan], Estimate]:
    """Return a function that estimates plans; it estimates each checkpointing mode once, and no mode that an
    earlier run has estimated.

    It raises RuntimeError for networks that `estimate_step` cannot follow.
    """
    dtype = compute_dtype(config.memory, denoiser)
    blocks = denoiser.family.blocks
    adapters, optimizing = adapter_bytes(adapted, config), optimizing_bytes(adapted, config)

    known = KnownEstimates(denoiser.cache_folder)

    @cache
    def step(mode: str, compute: str) -> StepEstimate:
        key = estimate_key(denoiser, adapted, config.adapter, batch, mode, dtype, compute)
        estimate = known.recall(key)
        if estimate is None:
            estimate = compute_step(mode, compute)
            known.remember(key, estimate)
        return estimate

    def compute_step(mode: str, compute: str) -> StepEstimate:
        attempt = partial(
            estimate_step, denoiser, adapted, config.adapter, batch, mode, dtype, compute=compute
        )
        try:
            return attempt()
        except RuntimeError as error:
            if not is_changed_in_place(error):
                raise
        return attempt(copies=True)

    def estimate(plan: MemoryPlan) -> Estimate:
        weights = weight_bytes(denoiser.specs, blocks, plan.base, dtype, plan.compute)
        weights += dequantizing_bytes(denoiser.specs, plan, dtype)
        sizes = block_bytes(denoiser.specs, blocks, dtype, plan.compute)
        # "block" and "block-offload" share one estimate.
        moves = plan.checkpointing == "block-offload"
        passes = step("block" if moves else plan.checkpointing, plan.compute)
        passes = passes.as_block_offload() if moves else passes
        copied = sizes if plan.base in COPIED else {}
        # A streamed base takes two pinned buffers of host memory, each for the largest layer.
        buffers = 2 * max((int(layer_bytes(spec, dtype)) for spec in denoiser.specs.values()), default=0)
        host = {"offload": sum(sizes.values()), "stream": buffers}.get(plan.base, 0)
        return Estimate(
            plan,
            weights=weights + passes.loose,
            adapters=adapters,
            step=passes,
            optimizing=optimizing,
            host=host + (passes.host if moves else 0),
            blocks=copied,
            passes=2 if plan.checkpointing in ("none", "selective") else 3,
        )

    return estimate


def dequantizing_bytes(specs: Mapping[str, LayerSpec], plan: MemoryPlan, dtype: torch.dtype) -> int:
    """Return the bytes that dequantizing the largest layer takes: its numbers before and after scaling."""
    quantized = (
        spec
        for spec in specs.values()
        if (spec.quantized_bytes is not None or is_quantized(spec, plan.base))
        and not is_multiplied(spec, plan.compute)
    )
    return 2 * max((layer.numel for layer in quantized), default=0) * dtype.itemsize


def adapter_bytes(adapted: Mapping[str, LayerSpec], config: TrainConfig) -> int:
    """Return the bytes of the adapters' weights, average and optimizer state; gradients are the step's."""
    weight = 4 if config.optimizer.weights == "fp32" else 2
    average = 4 if config.ema.decay else 0
    return int(count_trained(adapted, config) * (weight + average + row_of(config.optimizer).state_bytes))


def optimizing_bytes(adapted: Mapping[str, LayerSpec], config: TrainConfig) -> int:
    """Return the bytes of the optimizer's step: float32 gradients, and float32 copies of bf16 weights."""
    copies = 0 if config.optimizer.weights == "fp32" else 2
    return int(count_trained(adapted, config) * (4 + copies + row_of(config.optimizer).step_bytes))


def count_trained(adapted: Mapping[str, LayerSpec], config: TrainConfig) -> int:
    """Return the number of trained parameters."""
    with torch.device("meta"):
        adapters = build_adapters(adapted, config.adapter)
    return sum(p.numel() for adapter in adapters.values() for p in adapter.parameters())


def fits_surely(
    denoiser: Denoiser, adapted: Mapping[str, LayerSpec], config: TrainConfig, batch: Batch, budget: int
) -> bool:
    """Return whether the budget is so large that no estimate is needed.

    Counts every layer's input and output six times at the latents' full resolution, in float32.
    """
    dtype = compute_dtype(config.memory, denoiser)
    lengths = (count_positions(t.shape for t in tensors_in(each)) for each in batch.conditioning)
    given = max(lengths, default=0)
    positions = batch.latents.shape[0] * (batch.latents[0, 0].numel() + given)
    widths = sum(sum(spec.shape[:2]) for spec in denoiser.specs.values())
    weights = weight_bytes(denoiser.specs, denoiser.family.blocks, "resident", dtype)
    return weights + 2 * adapter_bytes(adapted, config) + 24 * positions * widths <= budget


def gib(size: int) -> str:
    """Return a size for people, in GiB or MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"
