"""The parts of a micro-batch's loss: each has a forward and a backward pass of its own.

So a step with several parts takes the memory of the largest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..adapters.base import Adapter
from ..config import ObjectiveConfig
from ..model import Batch, Captions
from ..user_error import UserError
from .loss import LossAt, loss_at
from .preservation import preservation_at, preservation_weight
from .slider import ENDS, SliderLoss, opposite_at


@dataclass(frozen=True)
class Part:
    """A summand of the loss."""

    compute: LossAt
    weight: float = 1.0
    strength: float = 1.0
    """Of the LoRA, in both passes."""


def parts_of(batch: Batch, config: ObjectiveConfig) -> Sequence[Part]:
    """Return the parts of the loss of a batch: the pictures, or both ends of a slider, and what to preserve
    at each strength.
    """
    if batch.slider is not None:
        slider = SliderLoss()
        parts = [Part(partial(slider.at, end), 0.5, end) for end in ENDS]
    elif batch.opposite is not None:
        parts = [Part(loss_at, 0.5, ENDS[0]), Part(opposite_at, 0.5, ENDS[1])]
    else:
        parts = [Part(loss_at)]
    if batch.preserved is not None:
        weight = preservation_weight(config)
        parts += [Part(preservation_at, weight * part.weight, part.strength) for part in parts]
    return parts


def require_strengths(parts: Sequence[Part], adapters: Mapping[str, Adapter]) -> None:
    """Raise UserError if a part needs the LoRA at a strength that ComfyUI's loader applies otherwise."""
    uneven = sorted({a.config.algorithm for a in adapters.values() if not a.is_even_in_strength})
    if uneven and any(part.strength != 1 for part in parts):
        raise UserError(
            f"a slider is used at strengths from -1 to 1, at which ComfyUI does not apply {uneven[0]} in "
            "proportion. Choose another algorithm in Build LoRA, such as lora."
        )


def with_largest_parts(batch: Batch, config: ObjectiveConfig) -> Batch:
    """Return a batch for planning memory with all parts that a micro-batch may have."""
    if not config.preservation:
        return batch
    return replace(batch, preserved=Captions(batch.conditioning, batch.captions))
