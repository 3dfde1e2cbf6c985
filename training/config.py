"""Every setting of a run: one tree of frozen dataclasses, nothing else decides what training does.

Configs travel on wires, are hashed into the run's key and written into the LoRA's metadata, so they hold plain values
only. `from_dict` refuses unknown keys and suggests the nearest: a misspelt option that is silently ignored costs a night.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

C = TypeVar("C")

DType = Literal["auto", "bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class AdapterConfig:
    """What is trained: which method, how large, on which layers."""

    algorithm: str = "lora"
    rank: int = 16
    alpha: float = 0.0
    """0 means alpha = rank, so that the adapter is applied at strength 1."""
    targets: str = "attn-mlp"
    """A preset of the model's family: "attn", "attn-mlp", "linear", "all"."""
    include: tuple[str, ...] = ()
    """Globs over module paths; when given, only preset layers that match one are trained."""
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(self.rank >= 1, f"rank must be at least 1, got {self.rank}; 16 suits most LoRAs.")
        _require(
            math.isfinite(self.alpha) and self.alpha >= 0,
            f"alpha must be positive, or 0 for alpha = rank; got {self.alpha}.",
        )

    @property
    def effective_alpha(self) -> float:
        return self.alpha or float(self.rank)


@dataclass(frozen=True)
class OptimizerConfig:
    """How the adapter's weights move."""

    name: str = "adamw"
    lr: float = 1e-4
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.lr) and self.lr > 0,
            f"learning rate must be above 0, got {self.lr}; 1e-4 suits most LoRAs.",
        )
        _require(
            self.weight_decay >= 0 and math.isfinite(self.weight_decay),
            f"weight decay must not be negative, got {self.weight_decay}.",
        )
        _require(
            all(0 <= beta < 1 for beta in self.betas),
            f"betas must be at least 0 and below 1, got {self.betas}.",
        )
        _require(self.max_grad_norm >= 0, f"max_grad_norm must not be negative, got {self.max_grad_norm}.")


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate's course over the whole run, as a multiple of `OptimizerConfig.lr`."""

    name: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    """Steps over which the schedule decays: the whole run's, whatever one Train Steps node does of it."""

    def __post_init__(self) -> None:
        _require(self.warmup_steps >= 0, f"warm-up must not be negative, got {self.warmup_steps} steps.")
        _require(self.total_steps >= 0, f"total steps must not be negative, got {self.total_steps}.")


@dataclass(frozen=True)
class ObjectiveConfig:
    """Which noise levels are practised, and how the error counts."""

    sigmas: str = "auto"
    """How noise levels are drawn: "auto" takes the family's; see SIGMAS in objective.py."""
    shift: float = 0.0
    """Flow models: above 1 favours high noise. 0 means the family's default."""


@dataclass(frozen=True)
class MemoryConfig:
    """Where things are kept and in which precision they are computed."""

    dtype: DType = "auto"
    """Precision of the forward pass; "auto" is bf16 where the device supports it, else fp16 (fp32 on the CPU)."""
    checkpointing: str = "auto"


@dataclass(frozen=True)
class TrainConfig:
    """One run. Equal configs, datasets, bases and starts give equal results, bit for bit."""

    batch_size: int = 1
    gradient_accumulation: int = 1
    seed: int = 0
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def __post_init__(self) -> None:
        _require(self.batch_size >= 1, f"batch size must be at least 1, got {self.batch_size}.")
        _require(
            self.gradient_accumulation >= 1,
            f"gradient accumulation must be at least 1, got {self.gradient_accumulation}.",
        )


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as nested dicts of plain values, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(kind: type[C], values: Mapping[str, Any], *, where: str = "") -> C:
    """Build the config dataclass `kind` from nested dicts.

    Raises ValueError naming the full path of an unknown key and the nearest known one, or of a value of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where}{key}: unknown setting; known: {', '.join(hints)}.{hint}")
    return kind(**{key: _value(hints[key], value, f"{where}{key}") for key, value in values.items()})


def digest(*parts: Any) -> str:
    """Return 16 hex digits that identify the given plain values (dataclasses, dicts, strings, numbers)."""
    plain = [to_dict(part) if dataclasses.is_dataclass(part) else part for part in parts]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_dict(typing.cast(type, hint), value, where=f"{where}.")
    if origin is Literal:
        _require(value in args, f"{where}: {value!r} is not one of {', '.join(map(repr, args))}.")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        inner = args[:1] * len(value) if args[1:] == (...,) else args
        _require(len(inner) == len(value), f"{where}: expected {len(inner)} values, got {len(value)}.")
        return tuple(_value(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(inner, value, strict=True)))
    if origin in (types.UnionType, typing.Union):
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = origin or hint
    if not isinstance(value, expected) or (hint in (int, float) and isinstance(value, bool)):
        raise ValueError(f"{where}: expected {getattr(expected, '__name__', hint)}, got {value!r}.")
    return value


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
