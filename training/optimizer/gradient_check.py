"""A check for parameters that no gradient reaches, which would silently never learn.

A LoRA's `down` gets its first gradient at step 2, when `up` is no longer zero, so the check ends then. With
dropout of whole modules it ends when chance can hardly explain a gap. Optimizers that do not move the weights
at first (schedule-free-radam) put it off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config import AdapterConfig
from ..log import log
from ..user_error import UserError

SHOWN = 8


class GradientCheck:
    """Watches the first steps of a run."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AdapterConfig) -> None:
        self.parameters = parameters
        self.silent = dict(parameters)
        self.total = len(self.silent)
        self.steps_left = steps_needed(config)
        self.before: tuple[nn.Parameter, Tensor] | None = None
        """A parameter that a gradient has reached, and a copy of it from that moment."""

    def look(self, step: int) -> None:
        """Look at the gradients of `step`, counted from 0. At the end of the check, log the parameters that
        no gradient has reached, or raise UserError if none has been reached.
        """
        if not self.steps_left or not self.silent or (self.before and torch.equal(*self.before)):
            return
        self.steps_left -= 1
        self.silent = {name: p for name, p in self.silent.items() if p.grad is None or not p.grad.any()}
        reached = next((p for name, p in self.parameters.items() if name not in self.silent), None)
        if reached is not None:
            self.before = reached, reached.detach().clone()
        if self.steps_left or not self.silent:
            return
        if len(self.silent) == self.total:
            raise UserError(
                f"step {step + 1}: no gradient has reached any of the {self.total} parameters, so nothing "
                "would be learned. Clear 'include' and 'exclude' in Build LoRA; if the dataset has masks, "
                "make them white where the subject is."
            )
        log.warning("%s", self.report(step))

    def report(self, step: int) -> str:
        """Return the sentence that names the parameters without a gradient up to `step`."""
        names = list(self.silent)
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return (
            f"no gradient has reached {len(names)} of {self.total} parameters by step {step + 1}: "
            f"{', '.join(names[:SHOWN])}{more}. They will not learn; exclude their layers in Build LoRA."
        )


def steps_needed(config: AdapterConfig) -> int:
    """Return after how many steps a parameter without a gradient is no accident: under one in a million."""
    left_out = config.module_dropout
    chance = left_out + (1.0 - left_out) * config.rank_dropout**config.rank
    return 2 if chance == 0.0 else 2 + math.ceil(math.log(1e-6) / math.log(chance))
