"""The training state: the step reached, the weights, the optimizer state. Training returns a new one.

It holds everything that a step reads and changes. Saved and loaded, it is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .config import AdapterConfig

Number = float | int | bool


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state: tensors and plain values by "<parameter name>.<key>"."""

    name: str = ""
    """The optimizer's row in OPTIMIZERS."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Number] = field(default_factory=dict)
    groups: tuple[Mapping[str, Number], ...] = ()
    """State of each parameter group as a whole, such as Prodigy's estimate of the learning rate."""


@dataclass(frozen=True)
class LossScale:
    """The power of two that multiplies an fp16 loss, so that small gradients are not rounded to zero.

    Halved when gradients overflow, doubled after many steps without overflow (Micikevicius et al. 2018,
    arXiv:1710.03740, sec. 3.2).
    """

    value: float = 65536.0
    clean: int = 0
    """Steps since the last change."""

    def halved(self) -> LossScale:
        return LossScale(max(1.0, self.value / 2))

    def after_step(self, growth_interval: int = 2000) -> LossScale:
        """Return the scale for the step after one whose gradients were finite."""
        if self.clean + 1 < growth_interval:
            return LossScale(self.value, self.clean + 1)
        return LossScale(min(self.value * 2, 2.0**24))


@dataclass(frozen=True)
class TrainState:
    """A run at one step. Tensors are on the CPU, adapter weights float32; nothing is changed in place."""

    step: int
    adapter: AdapterConfig
    base: str
    """Fingerprint of the base model."""
    weights: Mapping[str, Tensor]
    """"<module path>.<parameter>" -> tensor: the weights to sample with and to save. A schedule-free
    optimizer trains at different weights, which are in its state."""
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    losses: tuple[float, ...] = ()
    """One per step, from step 0: the mean over the step's micro-batches."""
    family: str = ""
    """The base's row in FAMILIES, which decides the keys of the LoRA file."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """For the metadata of the LoRA file, ignored by training: trigger word, dataset, settings."""
    ema: Mapping[str, Tensor] = field(default_factory=dict)
    """Moving average of the trained weights; empty if the run has none."""
    validations: tuple[tuple[int, float], ...] = ()
    """(step, loss on the held-out images) of each validation."""
    validated_on: str = ""
    """Digest of those images and of how the loss was measured: other losses do not compare."""
    loss_scale: LossScale | None = None
    """For fp16 runs."""

    def result(self, *, average: bool = True) -> Mapping[str, Tensor]:
        """Return the weights to save: the moving average if the run has one and `average` is on."""
        return {**self.weights, **self.ema} if average else self.weights


def best_step(validations: Sequence[tuple[int, float]]) -> int:
    """Return the step of the lowest validation loss, the first of equals; 0 without a measurement."""
    return min(validations, key=lambda entry: entry[1])[0] if validations else 0
