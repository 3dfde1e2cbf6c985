"""The value that training turns into another value: how far, with which weights, with which optimizer memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from .config import AdapterConfig
from .optimizer import OptimizerState


@dataclass(frozen=True)
class TrainState:
    """A run at one step. Tensors are on the CPU; adapter weights float32; nothing in it is ever changed in place."""

    step: int
    adapter: AdapterConfig
    base: str
    """Fingerprint of the base model it belongs to."""
    weights: Mapping[str, Tensor]
    """"<module path>.<parameter>" -> tensor."""
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    losses: tuple[float, ...] = ()
    """One a step, from step 0: the mean over the step's micro-batches."""
    family: str = ""
    """Name of the base's row in FAMILIES, which decides the LoRA file's keys."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the LoRA file's metadata should say and training does not depend on: trigger word, data set, settings."""
