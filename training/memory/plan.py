"""The memory plan: where the base is kept and what of a step is recomputed, chosen by what fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import MemoryConfig
from .checkpointing import MODES
from .store import STORES


@dataclass(frozen=True)
class Plan:
    """One way to spend memory."""

    base: str
    """One of STORES."""
    checkpointing: str
    """One of checkpointing.MODES."""

    def __str__(self) -> str:
        return f"base {self.base}, checkpointing {self.checkpointing}"


def candidates(config: MemoryConfig) -> Sequence[Plan]:
    """Return the plans that the settings allow, fastest first: all give the same result.

    Raises ValueError for unknown settings.
    """
    for name, value, known in (("base", config.base, STORES), ("checkpointing", config.checkpointing, MODES)):
        if value != "auto" and value not in known:
            raise ValueError(f"{name}: {value!r} is unknown; choose one of auto, {', '.join(known)}.")
    bases = ("resident", "offload") if config.base == "auto" else (config.base,)
    modes = tuple(MODES) if config.checkpointing == "auto" else (config.checkpointing,)
    return [Plan(base, mode) for base in bases for mode in modes]
