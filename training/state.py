"""The value that training turns into another value: how far, with which weights, with which memory.

Everything that a step reads and changes is in it; a state saved and loaded is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .config import AdapterConfig

Number = float | int | bool


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's memory: tensors and plain values by "<parameter name>.<key>"."""

    name: str = ""
    """Row of OPTIMIZERS that it belongs to."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Number] = field(default_factory=dict)
    groups: tuple[Mapping[str, Number], ...] = ()
    """What it remembers of each parameter group as a whole, such as Prodigy's learning rate estimate."""


@dataclass(frozen=True)
class LossScale:
    """The power of two by which an fp16 loss is multiplied, so that small gradients are not rounded to zero.

    It is halved when gradients overflow and doubled after a long time without (Micikevicius et al. 2018,
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
    """Fingerprint of the base model it belongs to."""
    weights: Mapping[str, Tensor]
    """"<module path>.<parameter>" -> tensor: what to draw with and to save. Where a schedule-free optimizer
    trains at other weights than these, those are in its memory."""
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    losses: tuple[float, ...] = ()
    """One a step, from step 0: the mean over the step's micro-batches."""
    family: str = ""
    """Name of the base's row in FAMILIES, which decides the LoRA file's keys."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the LoRA file's metadata says and training ignores: trigger word, data set, settings."""
    ema: Mapping[str, Tensor] = field(default_factory=dict)
    """Moving average of those of `weights` that are trained; empty when the run keeps none."""
    validations: tuple[tuple[int, float], ...] = ()
    """(step, loss on the held-out images) of every measurement."""
    validated_on: str = ""
    """Fingerprint of these images: losses on others do not compare."""
    loss_scale: LossScale | None = None
    """Of fp16 runs."""

    def result(self, *, average: bool = True) -> Mapping[str, Tensor]:
        """Return the weights to save: the moving average where the run keeps one and `average` is on."""
        return {**self.weights, **self.ema} if average else self.weights


def best_step(validations: Sequence[tuple[int, float]]) -> int:
    """Return the step of the lowest validation loss, the first of equals; 0 without a measurement."""
    return min(validations, key=lambda entry: entry[1])[0] if validations else 0
