"""The training loop. Read it from top to bottom: what happens in a run happens here, in this order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn

from . import distributed
from .adapters.build import build_adapters, draws, initialize, named_parameters, needs_base
from .adapters.select import select
from .adapters.strength import at_strength
from .config import AdapterConfig, TrainConfig, ValidationConfig, digest
from .live_state import LiveState
from .memory.device_memory import bytes_in_use, peak_bytes, reset_peak
from .memory.placement import Placement
from .memory.plan import agree_on_plans, budget_of, is_limit_hard
from .memory.precision import compute_dtype
from .memory.sharding import SHARDED, require_equal_shares, require_processes
from .memory.weight_store import UNPLACED
from .model import Batch, Captioned, Dataset, Denoiser, Samples
from .objective.loss import check_sampling, draw_loss
from .objective.parts import parts_of, require_strengths, with_largest_parts
from .objective.preservation import is_due
from .optimizer.gradient_check import GradientCheck
from .optimizer.schedule import multiplier
from .state import TrainState, best_step
from .user_error import NotFiniteError, UserError
from .validation import held_out_loss

STOP = "stop"
"""What `on_step` returns to end the run after the current step."""

SMOOTHING_STEPS = 50
"""The smoothed loss is the mean of so many steps."""


@dataclass(frozen=True)
class Progress:
    """One optimizer step, in numbers and words."""

    step: int
    """Steps done so far, this one included."""
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    total: int = 0
    """The step at which this part of the run ends."""
    smoothed: float = math.nan
    """Mean loss of the last steps."""
    epoch: float | None = None
    """Passes over the dataset so far, if it counts them."""
    images: int = 0
    """Images in this step."""
    validation: float | None = None
    """Loss on the held-out images, after the steps at which it is measured."""
    best: bool = False
    """Whether that loss is the lowest so far."""
    time_left: float = math.nan
    """Seconds left at the pace so far, everything included."""
    memory: int = 0
    """Peak bytes in use on the device; 0 where that is not counted."""
    plan: str = ""
    """The memory plan, in the words of Memory Settings: "offload, block"."""


@dataclass(frozen=True)
class Handles:
    """The callables that `on_step` gets between two steps."""

    state: Callable[[], TrainState]
    """Returns a copy of the state after this step; good until the next step begins."""
    give_base_back: Callable[[], AbstractContextManager[None]]
    """A context in which the base belongs to its owner again, unchanged, to draw samples for example.
    Training then goes on as if nothing had happened."""


OnStep = Callable[[Progress, Handles], str | None]


def ignore(progress: Progress, handles: Handles) -> None:
    """Watch nothing."""


@torch.enable_grad()
def train(
    denoiser: Denoiser,
    dataset: Dataset,
    config: TrainConfig,
    state: TrainState | None,
    *,
    steps: int,
    on_step: OnStep = ignore,
    notes: Mapping[str, str] = MappingProxyType({}),
    validation: Samples | None = None,
) -> TrainState:
    """Run `steps` optimizer steps from `state` (None: a fresh adapter) and return the state reached.

    `state` is not changed, and equal arguments give equal results: every draw is keyed by the step. The run
    ends early when `on_step` returns STOP, and when the loss on the held-out `validation` images has not
    improved for as long as the settings allow.

    Raises UserError for settings that cannot work, and NotFiniteError when the loss is no longer a number;
    the `Handles` that `on_step` got then still return the last sound state.
    """
    if steps < 1:
        raise UserError(f"steps must be at least 1, got {steps}.")
    if config.validation.every and validation is None:
        raise UserError("validation needs held-out images: connect a validation dataset, or set every to 0.")
    if config.memory.base == SHARDED:
        require_processes()
        require_equal_shares(config.gradient_accumulation)
    check_sampling(denoiser.sampling, denoiser.family.name)
    if config.objective.preservation:  # a dataset that lacks the captions says so now, not when they are due
        cast(Captioned, dataset).preserved_captions(1, seed=config.seed, index=0)

    # Where to begin.
    start = state or initial_state(denoiser, config)
    require_same_base(denoiser, start, config)
    if start.base != denoiser.fingerprint:  # the same base, as an earlier version of Graft fingerprinted it
        start = replace(start, base=denoiser.fingerprint)
    start = drop_stale_validations(start, config, validation)
    if is_over(config.validation, start.validations):
        return start

    # What to train, and how it may use memory: plans, the fastest first.
    budget = budget_of(denoiser, config.memory)  # before the adapters take their part of it
    most = None if budget is None else bytes_in_use(denoiser.device) + budget
    reset_peak(denoiser.device)
    live = LiveState(denoiser, config, start, notes)
    dtype = compute_dtype(config.memory, denoiser)
    adapted = {path: denoiser.specs[path] for path in live.adapters}
    largest = largest_batch(dataset, config)
    if largest is not None:
        require_strengths(parts_of(largest, config.objective), live.adapters)
    plans = agree_on_plans(denoiser, adapted, config, largest, budget)
    options = {"hard_limit": is_limit_hard(config.memory), "compile": config.memory.compile}

    gradient_check = GradientCheck(live.parameters, config.adapter)
    clock = Clock(start.step, start.step + steps)
    with Placement(denoiser, live.adapters, plans, dtype, most, **options) as placement:
        compute = partial(compute_gradients, denoiser, dataset, config, live)
        validate = partial(measure_if_due, denoiser, validation, live)
        handles = Handles(live.snapshot, placement.give_back)
        placement.retry(validate)  # a run that was interrupted after its last step has not measured it
        while live.step < clock.last and not is_over(config.validation, live.validations):
            clock.step_begins()
            lr = config.optimizer.lr * multiplier(config.schedule, live.step)
            loss, norm, images = placement.retry(compute)
            gradient_check.look(live.step)  # before the optimizer clears the gradients
            live.optimize(lr, loss)
            clock.step_ends()
            measured = placement.retry(validate)  # off the clock: a step's seconds are training alone
            progress = Progress(
                step=live.step,
                loss=loss,
                lr=lr,
                grad_norm=norm,
                seconds=clock.seconds,
                total=clock.last,
                smoothed=sum(recent := live.losses[-SMOOTHING_STEPS:]) / len(recent),
                epoch=epochs(dataset, config, live.step),
                images=images,
                validation=measured,
                best=measured is not None and best_step(live.validations) == live.step,
                time_left=clock.left(live.step),
                memory=peak_bytes(denoiser.device),
                plan=placement.plan.short,
            )
            if distributed.share(on_step(progress, handles) == STOP):  # rank 0 decides for all
                break
    return live.snapshot()


def compute_gradients(
    denoiser: Denoiser, dataset: Dataset, config: TrainConfig, live: LiveState
) -> tuple[float, float, int]:
    """Fill the gradients of the next step, finite and clipped; return its loss, their norm and its images.

    In fp16, a step whose gradients overflow is computed again at half the loss scale.
    """
    while True:
        scale = live.loss_scale.value if live.loss_scale else 1.0
        own = backward(denoiser, dataset, config, live.step, scale)
        total, images = distributed.sum_gradients(live.parameters, *own)
        loss = total / images
        # Backward divides by the images that were expected; batches at the end of a bucket are shorter.
        expected = config.batch_size * config.gradient_accumulation
        multiply_gradients(live.parameters.values(), expected / images / scale)
        norm = clip_gradients(live.parameters.values(), config.optimizer.max_grad_norm)
        if math.isfinite(norm) or live.loss_scale is None or scale == 1.0:
            break
        live.loss_scale = live.loss_scale.halved()
        live.optimizer.zero_grad(set_to_none=True)
    require_finite(loss, norm, live.step)
    return loss, norm, images


def backward(
    denoiser: Denoiser, dataset: Dataset, config: TrainConfig, step: int, scale: float = 1.0
) -> tuple[float, int]:
    """Add up `scale` times the gradients of this process's micro-batches of a step; return the sum of the
    losses of their images, and the number of images.

    Every image counts the same, whichever micro-batch it is in.
    """
    total, images = 0.0, 0
    for micro in range(distributed.rank(), config.gradient_accumulation, distributed.world()):
        index = step * config.gradient_accumulation + micro
        batch = draw_batch(dataset, config, step, index)
        share = len(batch.latents) / (config.batch_size * config.gradient_accumulation)
        losses = []
        for part in parts_of(batch, config.objective):
            with draws(config.seed, index), at_strength(part.strength):
                loss, sigma = draw_loss(
                    denoiser,
                    batch,
                    config.objective,
                    seed=config.seed,
                    index=index,
                    compute=part.compute,
                )
                loss = loss * part.weight
                (loss * (share * scale)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        value = sum(
            losses[1:], losses[0]
        ).item()  # only now: earlier, the CPU would wait before a backward pass
        if not math.isfinite(value):
            raise NotFiniteError(_not_finite(batch, sigma, step))
        total += value * len(batch.latents)
        images += len(batch.latents)
    return total, images


def draw_batch(dataset: Dataset, config: TrainConfig, step: int, index: int) -> Batch:
    """Return micro-batch `index`, with the captions to preserve in the steps where that is due.

    It is due in all micro-batches of a step: the processes of a sharded base make the same passes.
    """
    batch = dataset.batch(config.batch_size, seed=config.seed, index=index)
    if not is_due(config.objective, step):
        return batch
    captioned = cast(Captioned, dataset)
    return replace(
        batch, preserved=captioned.preserved_captions(config.batch_size, seed=config.seed, index=index)
    )


@torch.no_grad()
def multiply_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by `factor`."""
    gradients = [p.grad for p in parameters if p.grad is not None] if factor != 1.0 else []
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients together to a norm of at most `max_norm` (0: no limit); return the norm before."""
    return float(nn.utils.clip_grad_norm_(list(parameters), max_norm or math.inf))


def require_finite(loss: float, norm: float, step: int) -> None:
    """Raise NotFiniteError before a gradient that is not a number reaches the weights."""
    if not math.isfinite(norm):
        raise NotFiniteError(
            f"step {step + 1}: the gradient is {norm} (loss {loss:.4g}); the weights of step {step} are "
            "kept. Lower the learning rate, or set the precision to bf16 or fp32."
        )


def measure_if_due(denoiser: Denoiser, samples: Samples | None, live: LiveState) -> float | None:
    """Return the loss on the held-out images with the weights that would be saved; None between the steps at
    which it is measured."""
    every, limit = live.config.validation.every, live.config.validation.limit
    done = live.validations and live.validations[-1][0] == live.step
    if samples is None or not every or not live.step or live.step % every or done:
        return None
    with live.put_result_in_place():
        guidance = live.config.objective.guidance
        loss = distributed.share(held_out_loss(denoiser, samples, guidance=guidance, limit=limit))
    live.validations.append((live.step, loss))
    return loss


def drop_stale_validations(state: TrainState, config: TrainConfig, samples: Samples | None) -> TrainState:
    """Return the state without losses that do not compare with those to come: measured on other held-out
    images, or at another guidance."""
    if samples is None or not config.validation.every:
        return state
    guidance = config.objective.guidance
    key = digest(samples.fingerprint, config.validation.limit, *([guidance] if guidance >= 0 else []))
    if state.validated_on == key:
        return state
    validations = () if state.validated_on else state.validations  # states of earlier versions have no key
    return replace(state, validations=validations, validated_on=key)


def is_over(config: ValidationConfig, validations: Sequence[tuple[int, float]]) -> bool:
    """Return whether the last `patience` measurements brought no new lowest loss."""
    best = best_step(validations)
    return bool(config.patience) and sum(step > best for step, _ in validations) >= config.patience


def initial_state(denoiser: Denoiser, config: TrainConfig) -> TrainState:
    """Return step 0: a fresh adapter that changes nothing yet, drawn from the run's seed."""
    adapters = build_adapters(select(denoiser.specs, denoiser.family, config.adapter), config.adapter)
    if needs_base(adapters):
        with denoiser.hold(compute_dtype(config.memory, denoiser), UNPLACED) as base:
            initialize(adapters, config.seed, base.layers, denoiser.device)
    else:
        initialize(adapters, config.seed)
    weights = {name: tensor.detach() for name, tensor in named_parameters(adapters).items()}
    return TrainState(0, config.adapter, denoiser.fingerprint, weights, family=denoiser.family.name)


def require_same_base(denoiser: Denoiser, state: TrainState, config: TrainConfig) -> None:
    """Raise UserError when `state` cannot be continued here: another base model, or another kind of LoRA."""
    if not denoiser.is_base(state.base):
        raise UserError(
            f"the training state at step {state.step} belongs to another base model (its fingerprint is "
            f"{state.base}, this model's is {denoiser.fingerprint}); load the base it was trained on, or "
            "start from its LoRA file instead."
        )
    names = [f.name for f in fields(AdapterConfig)]
    differing = [n for n in names if getattr(state.adapter, n) != getattr(config.adapter, n)]
    if differing:
        trained, asked = (
            ", ".join(f"{name} {getattr(adapter, name)!r}" for name in differing)
            for adapter in (state.adapter, config.adapter)
        )
        raise UserError(
            f"the training state at step {state.step} holds a LoRA with {trained}, but the settings ask "
            f"for {asked}; connect the state without another Build LoRA."
        )


def epochs(dataset: Dataset, config: TrainConfig, step: int) -> float | None:
    """Return the passes over `dataset` after `step` steps; None if it does not count them."""
    length = getattr(dataset, "steps_per_epoch", None)
    return step * config.gradient_accumulation / length(config.batch_size) if length else None


def largest_batch(dataset: Dataset, config: TrainConfig) -> Batch | None:
    """Return a batch of the largest size, for which memory is planned; None if `dataset` does not know."""
    largest = getattr(dataset, "largest_batch", None)
    return with_largest_parts(largest(config.batch_size), config.objective) if largest else None


class Clock:
    """Times steps. Monotonic, because the wall clock may be set during a run."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.began = self.step_began = time.monotonic()
        self.seconds = 0.0

    def step_begins(self) -> None:
        self.step_began = time.monotonic()

    def step_ends(self) -> None:
        self.seconds = time.monotonic() - self.step_began

    def left(self, step: int) -> float:
        """Return the seconds left after `step`."""
        return (self.last - step) * (time.monotonic() - self.began) / max(1, step - self.first)


def _not_finite(batch: Batch, sigma: Tensor, step: int) -> str:
    images = ", ".join(batch.names) or "unknown images"
    sigmas = ", ".join(f"{s:.3f}" for s in sigma.tolist())
    return (
        f"step {step + 1}: the loss is not a number for {images} at sigma {sigmas}; the weights of step "
        f"{step} are kept. Check the image, or set the precision to bf16 or fp32."
    )
