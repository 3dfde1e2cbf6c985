"""The mutable state of a run: adapters, optimizer, average, losses. `TrainState` is its frozen copy.

`snapshot` copies it all into a state. In the middle of an optimizer step, when some weights have moved and
others have not, it refuses: whatever interrupts a run, no state is ever half a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from .adapters.build import limit_norms, lr_scales, named_parameters, restore_adapters
from .config import TrainConfig
from .memory.precision import DTYPES, compute_dtype, stepping_in_float32
from .model import Denoiser
from .optimizer.build import (
    build_optimizer,
    final_weights,
    load_optimizer,
    reserve_optimizer_state,
    row_of,
    save_optimizer,
    set_lr,
)
from .optimizer.ema import start_ema, update_ema
from .state import LossScale, TrainState
from .user_error import UserError


class MidStep(RuntimeError):
    """A state was asked for in the middle of an optimizer step."""


class LiveState:
    """A state as the objects that training changes."""

    def __init__(
        self, denoiser: Denoiser, config: TrainConfig, state: TrainState, notes: Mapping[str, str]
    ) -> None:
        self.config = config
        self.initial = replace(state, notes={**state.notes, **notes})
        self.adapters = restore_adapters(denoiser.specs, state.adapter, state.weights, denoiser.device)
        self.weights = named_parameters(self.adapters)
        self.parameters = {name: p for name, p in self.weights.items() if p.requires_grad}
        """Those of `weights` that are trained."""
        for adapter in self.adapters.values():
            for name, parameter in adapter.named_parameters():
                if name not in adapter.exact:
                    parameter.data = parameter.data.to(DTYPES[config.optimizer.weights])
        scales = lr_scales(self.adapters, config.adapter)
        self.optimizer = build_optimizer(self.parameters, config.optimizer, scales)
        load_optimizer(self.optimizer, config.optimizer, state.optimizer)
        self._reserved = reserve_optimizer_state(self.optimizer, config.optimizer)
        for setting, value in (("EMA decay", config.ema.decay), ("max norm", config.adapter.max_norm)):
            if value and row_of(config.optimizer).averages:
                raise UserError(
                    f"{config.optimizer.title} averages the weights itself; set the {setting} to 0."
                )
        self.ema = start_ema(config.ema, self.parameters, state.ema)
        self.losses = list(state.losses)
        self.validations = list(state.validations)
        self.loss_scale: LossScale | None = None
        if compute_dtype(config.memory, denoiser) == torch.float16:
            self.loss_scale = state.loss_scale or LossScale()
        self.is_whole = True
        """False while a step moves the weights."""

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    def optimize(self, lr: float, loss: float) -> None:
        """Move the weights by their gradients, which are finite and clipped, and count the step."""
        self.is_whole = False
        set_lr(self.optimizer, lr)
        self._reserved.clear()  # the step allocates the real tensors in its place
        with stepping_in_float32(self.parameters, self.config.seed, self.step):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        limit_norms(self.adapters, self.config.adapter)
        update_ema(self.config.ema, self.ema, self.parameters, self.step)
        if self.loss_scale:
            self.loss_scale = self.loss_scale.after_step()
        self.losses.append(loss)
        self.is_whole = True

    def snapshot(self) -> TrainState:
        """Return a copy as a state. Raises MidStep inside `optimize`."""
        if not self.is_whole:
            raise MidStep(f"step {self.step + 1} is half done; the last whole state is the saved one.")
        weights = _copy({**self.weights, **final_weights(self.optimizer, self.config.optimizer)})
        return replace(
            self.initial,
            step=self.step,
            weights=weights,
            optimizer=save_optimizer(self.optimizer, self.config.optimizer),
            losses=tuple(self.losses),
            ema=_copy(self.ema),
            validations=tuple(self.validations),
            loss_scale=self.loss_scale,
        )

    @contextmanager
    def put_result_in_place(self) -> Iterator[None]:
        """Let the adapters compute with the weights that would be saved: the moving average, or those of a
        schedule-free optimizer."""
        trained = {name: parameter.data for name, parameter in self.parameters.items()}
        result = {**final_weights(self.optimizer, self.config.optimizer), **self.ema}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = result[name]
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = trained[name]


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}
