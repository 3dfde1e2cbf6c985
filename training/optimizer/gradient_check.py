"""Which parameters no gradient reaches: the costliest mistake is a part that silently never learns.

A LoRA's `down` gets its first gradient at step 2, when `up` is no longer zero, so that is when the answer
is due; with dropout of whole modules it is due when chance alone can hardly explain a gap. Optimizers that
leave all weights where they are at first (schedule-free-radam) put it off.
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
        """A parameter that a gradient has reached, and a copy of it as it was then."""

    def look(self, step: int) -> None:
        """Take note of the gradients of `step`, counted from 0; report when it is time.

        Logs the names that no gradient reached. Raises UserError when none was reached at all.
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
        """Return the sentence that names what has stayed without a gradient up to `step`."""
        names = list(self.silent)
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return (
            f"no gradient has reached {len(names)} of {self.total} parameters by step {step + 1}: "
            f"{', '.join(names[:SHOWN])}{more}. They will not learn; exclude their layers in Build LoRA."
        )


def steps_needed(config: AdapterConfig) -> int:
    """Return after how many steps a parameter without a gradient is no accident (under one in a million)."""
    left_out = config.module_dropout
    chance = left_out + (1.0 - left_out) * config.rank_dropout**config.rank
    return 2 if chance == 0.0 else 2 + math.ceil(math.log(1e-6) / math.log(chance))
