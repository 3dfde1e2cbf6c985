"""The training loop. Read it from top to bottom: everything that happens in a run happens here, in this order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from . import objective, rng
from .adapters import attach, build_adapters, named_parameters, restore_adapters, select
from .config import TrainConfig
from .memory.checkpointing import checkpointed
from .memory.precision import compute_dtype
from .model import Batch, Dataset, Denoiser
from .optimizer import build_optimizer, load_optimizer, save_optimizer, set_lr
from .schedule import multiplier
from .state import TrainState

STOP = "stop"
"""What `on_step` returns to end the run after the step that it was told of."""


@dataclass(frozen=True)
class Progress:
    """What happened in one optimizer step."""

    step: int
    """Steps done so far, this one included."""
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    state: Callable[[], TrainState]
    """Copies the state after this step; good until the next one begins."""


OnStep = Callable[[Progress], str | None]


def ignore(progress: Progress) -> None:
    """Watch nothing."""


@torch.inference_mode(False)  # ComfyUI runs nodes in inference mode, whose tensors autograd refuses
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
) -> TrainState:
    """Run `steps` optimizer steps from `state` (None: a fresh adapter) and return the state reached.

    `state` is not changed, and equal arguments give equal results: every draw is keyed by the step.
    Raises ValueError for settings that cannot work and FloatingPointError when the loss stops being a number; the last
    `Progress` given to `on_step` then still holds a sound state.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    objective.check_sampling(denoiser.sampling, denoiser.family.name)
    start = state or initial_state(denoiser, config)
    require_same_base(denoiser, start, config)
    adapters = restore_adapters(denoiser.specs, start.adapter, start.weights, denoiser.device)
    parameters = named_parameters(adapters)
    optimizer = build_optimizer(parameters, config.optimizer)
    load_optimizer(optimizer, config.optimizer, start.optimizer)
    losses = list(start.losses)

    def snapshot() -> TrainState:
        weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in parameters.items()}
        memory = save_optimizer(optimizer, config.optimizer)
        return replace(
            start,
            step=len(losses),
            weights=weights,
            optimizer=memory,
            losses=tuple(losses),
            notes={**start.notes, **notes},
        )

    dtype = compute_dtype(config.memory, denoiser.device)
    with denoiser.hold(dtype) as base:
        with attach(base.layers, adapters), checkpointed(base.module, denoiser.family.blocks, config.memory.checkpointing):
            for step in range(start.step, start.step + steps):
                began = time.monotonic()
                lr = config.optimizer.lr * multiplier(config.schedule, step)
                set_lr(optimizer, lr)
                loss = backward(denoiser, dataset, config, step)
                norm = clip_gradients(parameters.values(), config.optimizer.max_grad_norm)
                require_finite(loss, norm, step)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss)
                report = Progress(len(losses), loss, lr, norm, time.monotonic() - began, snapshot)
                if on_step(report) == STOP:
                    break
    return snapshot()


def backward(denoiser: Denoiser, dataset: Dataset, config: TrainConfig, step: int) -> float:
    """Add the gradients of one optimizer step's micro-batches and return their mean loss."""
    total = 0.0
    for micro in range(config.gradient_accumulation):
        index = step * config.gradient_accumulation + micro
        batch = dataset.batch(config.batch_size, seed=config.seed, index=index)
        loss, sigma = objective.loss(denoiser, batch, config.objective, seed=config.seed, index=index)
        if not torch.isfinite(loss):
            raise FloatingPointError(_not_finite(batch, sigma, step))
        (loss / config.gradient_accumulation).backward()  # type: ignore[no-untyped-call]
        total += loss.item() / config.gradient_accumulation
    return total


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their common norm is at most `max_norm` (0: leave them); return the norm before."""
    return float(nn.utils.clip_grad_norm_(list(parameters), max_norm or math.inf))


def require_finite(loss: float, norm: float, step: int) -> None:
    """Raise FloatingPointError before a gradient that is no number reaches the weights."""
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"step {step + 1}: the gradient is {norm} (loss {loss:.4g}); the weights of step {step} are kept. "
            "Lower the learning rate, or set the precision to bf16 or fp32."
        )


def initial_state(denoiser: Denoiser, config: TrainConfig) -> TrainState:
    """Return step 0: a fresh adapter that changes nothing yet, drawn from the run's seed."""
    adapters = build_adapters(select(denoiser.specs, denoiser.family, config.adapter), config.adapter)
    for name, adapter in adapters.items():
        adapter.initialise(rng.generator(config.seed, "init", name))
    weights = {name: tensor.detach() for name, tensor in named_parameters(adapters).items()}
    return TrainState(0, config.adapter, denoiser.fingerprint, weights, family=denoiser.family.name)


def require_same_base(denoiser: Denoiser, state: TrainState, config: TrainConfig) -> None:
    """Raise ValueError when `state` cannot be continued here: another base model, or another kind of LoRA."""
    if state.base != denoiser.fingerprint:
        raise ValueError(
            f"the training state at step {state.step} belongs to another base model (fingerprint {state.base}, this "
            f"model has {denoiser.fingerprint}); load the base it was trained on, or start from its LoRA file instead."
        )
    if state.adapter != config.adapter:
        raise ValueError(
            f"the training state at step {state.step} holds {state.adapter}, but the settings ask for "
            f"{config.adapter}; connect the state without another Build LoRA."
        )


def _not_finite(batch: Batch, sigma: Tensor, step: int) -> str:
    images = ", ".join(batch.names) or "unknown"
    levels = ", ".join(f"{s:.3f}" for s in sigma.tolist())
    return (
        f"step {step + 1}: the loss is not a number for {images} at noise level {levels}; the weights of step {step} "
        "are kept. Check the image, or set the precision to bf16 or fp32."
    )
