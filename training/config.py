"""Every setting of a run: one tree of frozen dataclasses, nothing else decides what training does.

Configs travel on wires, are hashed into the run's key and written into the LoRA's metadata, so they hold
plain values only. A new setting is a field of `added(default)`: at its default every key stays as it was.
`from_dict` refuses unknown keys and suggests the nearest: a misspelled option that is silently ignored costs
a night.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from .user_error import UserError

C = TypeVar("C")

DType = Literal["auto", "bf16", "fp16", "fp32"]

ADDED = "added"
"""In the metadata of fields that are newer than people's files."""


def added(default: C) -> C:
    """Return a dataclass field for a new setting: at its default, digests and files do not name it.

    So the runs, caches and files from before are found again. The default can never change: it is what a file
    without the setting was made with.
    """
    return field(default=default, metadata={ADDED: True})


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What is trained: which method, how large, on which layers.

    Patterns are globs over module paths; one that begins with "re:" is a regular expression over the whole
    path. In `algorithms`, `ranks`, `alphas` and `lrs` the first pattern that matches a layer decides.
    """

    algorithm: str = "lora"
    rank: int = 16
    alpha: float = 0.0
    """0 is the method's own: the rank, so that the adapter is applied at strength 1; with rsLoRA 4, which is
    strength 1 at rank 16; for LoHa 1, as in LyCORIS, since both its halves start large."""
    targets: str = "attn-mlp"
    """A preset of the model's family: "attn", "attn-mlp", "linear", "all", "everything"."""
    include: tuple[str, ...] = ()
    """Patterns; when given, only preset layers that match one are trained."""
    exclude: tuple[str, ...] = ()
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank, so that every rank learns as fast
    (Kalajdzievski 2023, arXiv:2312.03732). Folded into the stored alpha: every loader renders it right."""
    init: str = "default"
    """"default", "gaussian", or "pissa": start from the base's principal components (Meng et al. 2024,
    arXiv:2404.02948), saved as a difference to the unchanged base."""
    dropout: float = 0.0
    """Share of the adapter's inputs set to 0 in a training step."""
    rank_dropout: float = 0.0
    """Share of the rank components left out of a training step; a full LoKr matrix has none."""
    module_dropout: float = 0.0
    """Share of the adapters left out of a training step."""
    max_norm: float = 0.0
    """After each step a layer's difference is scaled down to this Frobenius norm; 0 leaves it."""
    lora_plus_ratio: float = 1.0
    """Learning rate of the factor that starts at zero over that of the others (LoRA+, Hayou et al. 2024,
    arXiv:2402.12354, who recommend 16)."""
    tucker: bool = False
    """Convolutions larger than 1x1: decompose the kernel's own axes too, for a smaller file."""
    factor: int = -1
    """LoKr: size of the small Kronecker factor; -1 divides each side of the weight as evenly as it can."""
    decompose_both: bool = False
    """LoKr: decompose the small factor as well."""
    full_matrix: bool = False
    """LoKr: decompose neither factor; rank and alpha then have no effect."""
    blocks: str = ""
    """Which of the model's repeated blocks are trained, counted from 0 in the model's order: "0-11, 18, 30-",
    or "early", "middle", "late" for a third of them. Layers outside blocks are then left out."""
    algorithms: tuple[tuple[str, str], ...] = ()
    """(pattern, algorithm)."""
    ranks: tuple[tuple[str, int], ...] = ()
    """(pattern, rank)."""
    alphas: tuple[tuple[str, float], ...] = ()
    """(pattern, alpha)."""
    lrs: tuple[tuple[str, float], ...] = ()
    """(pattern, multiple of the learning rate)."""
    start_from: str = ""
    """LoRA file to start from, by the name that ComfyUI lists it under; empty starts fresh."""
    start_size: Literal["file", "settings"] = "file"
    """Of `start_from`: take algorithm, rank and alpha from the file, or pad its layers to these settings."""
    text_encoder: float = 0.0
    """Train the CLIP text encoders too, at this multiple of the learning rate; 0 leaves them as they are."""

    def __post_init__(self) -> None:
        for rank in (self.rank, *(rank for _, rank in self.ranks)):
            require(rank >= 1, f"rank must be at least 1, got {rank}; 16 suits most LoRAs.")
        for alpha in (self.alpha, *(alpha for _, alpha in self.alphas)):
            require(
                math.isfinite(alpha) and alpha >= 0,
                f"alpha must be positive, or 0 for the method's own; got {alpha}.",
            )
        for name in ("dropout", "rank_dropout", "module_dropout"):
            share = getattr(self, name)
            require(0 <= share < 1, f"{name} must be at least 0 and below 1, got {share}; 0 switches it off.")
        require(
            math.isfinite(self.text_encoder) and self.text_encoder >= 0,
            f"text_encoder is a multiple of the learning rate: 0 (off) or more, got {self.text_encoder}.",
        )
        require(
            math.isfinite(self.max_norm) and self.max_norm >= 0,
            f"max_norm must be positive, or 0 for no limit; got {self.max_norm}.",
        )
        for ratio in (self.lora_plus_ratio, *(ratio for _, ratio in self.lrs)):
            require(
                math.isfinite(ratio) and ratio > 0,
                f"a learning-rate ratio must be above 0, got {ratio}; 1 changes nothing, and 'exclude' "
                "leaves layers out.",
            )
        require(
            self.init in ("default", "gaussian", "pissa"),
            f"init: {self.init!r} is not supported; choose one of default, gaussian, pissa.",
        )
        require(
            self.init == "default" or {self.algorithm, *(name for _, name in self.algorithms)} == {"lora"},
            f"init {self.init!r} is for LoRA; set algorithm to 'lora' or init to 'default'.",
        )
        require(
            self.init != "pissa" or not (self.max_norm or self.tucker),
            "PiSSA starts from the base's largest components and knows neither max_norm nor tucker: set them "
            "to 0 and off, or init to 'default'.",
        )
        require(
            self.factor == -1 or self.factor >= 2,
            f"factor must be at least 2, or -1 to divide the weight evenly; got {self.factor}.",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How the adapter's weights move."""

    name: str = "adamw"
    lr: float = 1e-4
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 switches clipping off."""
    d_coef: float = 1.0
    """Prodigy: multiplies the learning rate that it finds; 0.5 is more careful, 2 bolder."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Format of the adapter's weights on the device. "bf16" halves them and their gradients; each step is
    computed in float32 and rounded up or down at random, so that small steps are not lost."""

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.lr) and self.lr > 0,
            f"learning rate must be above 0, got {self.lr}; 1e-4 suits most LoRAs.",
        )
        require(math.isfinite(self.eps) and self.eps > 0, f"eps must be above 0, got {self.eps}.")
        require(
            math.isfinite(self.d_coef) and self.d_coef > 0,
            f"d_coef must be above 0, got {self.d_coef}; 1 is usual.",
        )
        require(
            self.weight_decay >= 0 and math.isfinite(self.weight_decay),
            f"weight decay must not be negative, got {self.weight_decay}.",
        )
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"betas must be at least 0 and below 1, got {self.betas}.",
        )
        require(self.max_grad_norm >= 0, f"max_grad_norm must not be negative, got {self.max_grad_norm}.")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate's course over the whole run, as a multiple of `OptimizerConfig.lr`."""

    name: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    """Steps over which the schedule decays: the whole run's, whatever one Train Steps node does of it."""
    floor: float = 0.0
    """The multiple that the decay ends at."""
    cycles: int = 1
    """Of "restarts": how many times the course is run through."""
    power: float = 1.0
    """Of "polynomial": 1 is a straight line, 2 falls early, 0.5 late."""

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, f"warm-up must not be negative, got {self.warmup_steps} steps.")
        require(self.total_steps >= 0, f"total steps must not be negative, got {self.total_steps}.")
        require(0 <= self.floor <= 1, f"floor must be 0 to 1, a multiple of the rate; got {self.floor}.")
        require(self.cycles >= 1, f"cycles must be at least 1, got {self.cycles}.")
        require(math.isfinite(self.power) and self.power > 0, f"power must be above 0, got {self.power}.")


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """A moving average of the weights, kept beside them: smoother, and often better, than the last step's."""

    decay: float = 0.0
    """Share of the average that a step keeps, in the long run; 0 keeps no average, 0.999 suits long runs."""
    power: float = 0.75
    """How fast the share rises to `decay`: 1 - (1 + step) ** -power; the first steps are soon forgotten."""

    def __post_init__(self) -> None:
        require(0 <= self.decay < 1, f"EMA decay must be 0 (off) or more and below 1, got {self.decay}.")
        require(self.power > 0, f"EMA power must be above 0, got {self.power}; 0.75 is usual.")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """When held-out images are measured during a run, and when the run has learned enough."""

    every: int = 0
    """Steps between two measurements; 0 measures nothing."""
    patience: int = 0
    """The run ends after this many measurements in a row without a new lowest loss; 0 never ends it."""
    limit: int = 0
    """Measure this many of the held-out images only; 0 takes all."""
    result: Literal["last", "best"] = "last"
    """Which state the run hands on: that of its last step, or that of its lowest validation loss."""

    def __post_init__(self) -> None:
        for name in ("every", "patience", "limit"):
            value = getattr(self, name)
            require(value >= 0, f"validation {name} must not be negative, got {value}.")
        require(self.every > 0 or not self.patience, "patience needs validation: set the steps between two.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often a run saves itself, and what it keeps. Decides nothing about the result."""

    minutes: float = 5.0
    """Longest time between two checkpoints; 0 saves after every step."""
    steps: int = 250
    """Save at every multiple of this many steps as well; 0 goes by the time alone."""
    keep: int = 4
    """Newest checkpoints at multiples of `steps` that are kept, besides the newest two of all, the best one
    and those that a node handed on."""
    lora: bool = True
    """Write each checkpoint's LoRA file, in bf16; those at multiples of `steps` stay when it goes."""
    sqlite: bool = False
    """Write the run's log as a SQLite file too."""

    def __post_init__(self) -> None:
        require(self.minutes >= 0, f"minutes between checkpoints must not be negative, got {self.minutes}.")
        require(self.steps >= 0, f"steps between checkpoints must not be negative, got {self.steps}.")
        require(self.keep >= 1, f"at least one checkpoint must be kept, got {self.keep}.")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Which noise levels are practised, what noise is added, and how the error counts.

    Levels are the part of x_t that is noise, 0 (clean) to 1 (pure noise), whatever the model's sigmas are.
    """

    sigmas: str = "auto"
    """How noise levels are drawn: "auto" takes the family's; see SIGMAS in objective/sigmas.py."""
    shift: float = 0.0
    """Above 1 favors high noise, below 1 low noise. 0 means the family's default."""
    resolution_shift: Literal["auto", "none", "flux", "sd3"] = "auto"
    """How the shift follows the image's size (RESOLUTION_SHIFTS); "auto": the family's where `shift` is 0."""
    mean: float = 0.0
    """Of the normal variable of "logit-normal": above 0 favors high noise."""
    std: float = 1.0
    """Of the normal variable of "logit-normal" and "sigmoid": large values favor both ends."""
    mode_scale: float = 1.29
    """Of "mode": how much denser the middle is; negative values thin it out."""
    bias: float = 0.0
    """Above 0 favors the distribution's high levels, below 0 low ones; 1 triples the upper half's odds."""
    min_noise: float = 0.0
    """Lowest level practised; the distribution is squeezed into min_noise..max_noise."""
    max_noise: float = 1.0
    stratified: bool = True
    """Draw a level from each equal part of the distribution per batch: less variance, same expectation."""
    loss: str = "mse"
    """Of one element's error: a name in LOSSES."""
    huber_delta: float = 0.1
    """Where "huber" and "pseudo-huber" turn from quadratic to linear."""
    space: str = "auto"
    """What the error is measured in: a name in SPACES; "auto" takes the family's."""
    weighting: str = "none"
    """How the noise levels count: a name in WEIGHTINGS."""
    min_snr_gamma: float = 5.0
    """Of "min-snr": signal-to-noise ratios above this one count no more than it."""
    noise_offset: float = 0.0
    """Strength of a constant added to each channel of the noise, to learn very dark and bright images."""
    pyramid_noise: float = 0.0
    """Discount (0 to 1) of each coarser layer of noise added to the noise; 0 adds none."""
    input_perturbation: float = 0.0
    """Strength of extra noise in x_t that the target does not know of."""
    differential_guidance: float = 1.0
    """Moves the target this many times as far from the prediction; 1 is the plain target."""
    guidance: float = -1.0
    """Guidance input of guidance-distilled models; -1 means the family's default."""

    def __post_init__(self) -> None:
        for name in (
            "shift",
            "mean",
            "std",
            "mode_scale",
            "bias",
            "huber_delta",
            "min_snr_gamma",
            "guidance",
        ):
            require(
                math.isfinite(getattr(self, name)), f"{name} must be a number, got {getattr(self, name)}."
            )
        require(self.shift >= 0, f"shift must be positive, or 0 for the family's; got {self.shift}.")
        require(self.std > 0, f"std must be above 0, got {self.std}; 1.0 is usual.")
        require(
            -1 <= self.mode_scale <= 1.75, f"mode_scale must be between -1 and 1.75, got {self.mode_scale}."
        )
        require(-8 <= self.bias <= 8, f"bias must be between -8 and 8, got {self.bias}; 0 is none.")
        require(
            0 <= self.min_noise < self.max_noise <= 1,
            f"noise levels must be 0 <= min < max <= 1, got {self.min_noise} to {self.max_noise}.",
        )
        require(self.huber_delta > 0, f"huber_delta must be above 0, got {self.huber_delta}.")
        require(
            self.min_snr_gamma > 0, f"min_snr_gamma must be above 0, got {self.min_snr_gamma}; 5 is usual."
        )
        require(
            0 <= self.noise_offset <= 1,
            f"noise_offset must be 0 to 1, got {self.noise_offset}; 0.05 is usual.",
        )
        require(
            0 <= self.pyramid_noise < 1,
            f"pyramid_noise must be 0 to 1, got {self.pyramid_noise}; 0.3 is usual.",
        )
        require(
            0 <= self.input_perturbation <= 1,
            f"input_perturbation must be 0 to 1, got {self.input_perturbation}; 0.1 is usual.",
        )
        require(
            0 < self.differential_guidance <= 100,
            f"differential_guidance must be above 0, got {self.differential_guidance}; 1 is off, 3 is usual.",
        )
        require(
            self.guidance >= 0 or self.guidance == -1,
            f"guidance must be 0 or more, or -1 for the family's; got {self.guidance}.",
        )


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Where things are kept and in which precision they are computed."""

    dtype: DType = "auto"
    """Precision of the forward pass; "auto": bf16 where the device supports it, else fp16 (CPU: fp32)."""
    checkpointing: str = "auto"
    """What of a forward pass is kept for the backward pass: "none", "selective", "block", "block-offload".
    "auto" keeps as much as fits (`memory.plan`)."""
    base: str = "auto"
    """Where the frozen weights are: "resident", "offload", or in fewer bits as "fp8", "int8", "nf4". "auto"
    keeps them on the device if they fit and in host memory if not; it never rounds them."""
    budget_gb: float = 0.0
    """Memory of the device that the run may take, in GiB; 0 is all that is free."""
    compile: bool = False
    """Whether the repeated blocks are compiled (`memory.compiling`); changes how numbers are rounded."""

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.budget_gb) and self.budget_gb >= 0,
            f"the memory budget must be above 0 GiB, or 0 for all that is free; got {self.budget_gb}.",
        )

    def deciding(self) -> MemoryConfig:
        """Return the settings that change a run's result: how numbers are rounded, not where they are."""
        rounds = self.base not in ("resident", "offload")
        return replace(self, checkpointing="auto", base=self.base if rounds else "auto", budget_gb=0.0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run. Equal configs, datasets, bases and starts give equal results: bit for bit where kernels add in
    one order, as on the CPU."""

    batch_size: int = 1
    gradient_accumulation: int = 1
    seed: int = 0
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch size must be at least 1, got {self.batch_size}.")
        require(
            self.gradient_accumulation >= 1,
            f"gradient accumulation must be at least 1, got {self.gradient_accumulation}.",
        )


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as nested dicts of plain values, ready for JSON, without `added` fields at their
    default.
    """
    values = ((item, getattr(config, item.name)) for item in dataclasses.fields(config))
    return {
        item.name: to_dict(value) if dataclasses.is_dataclass(value) else value
        for item, value in values
        if ADDED not in item.metadata or value != item.default
    }


def to_text(value: Any) -> str:
    """Return what `repr` says of a dataclass, without `added` fields at their default.

    It is the `__repr__` of those that are part of a digest by their repr.
    """
    return f"{type(value).__name__}({', '.join(f'{name}={part!r}' for name, part in to_dict(value).items())})"


def from_dict(kind: type[C], values: Mapping[str, Any], *, where: str = "") -> C:
    """Build the config dataclass `kind` from nested dicts.

    Raises UserError naming an unknown key's full path and the nearest known ones, or the path of a wrongly
    typed value.
    """
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise unknown_key(key, difflib.get_close_matches(key, list(hints)), where=where)
    return kind(**{key: _value(hints[key], value, f"{where}{key}") for key, value in values.items()})


def unknown_key(key: str, near: Sequence[str], *, where: str = "") -> UserError:
    """Return the error that names a key that is not known, and those that may be meant."""
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return UserError(f"{where}{key}: unknown setting.{hint}")


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
        require(value in args, f"{where}: {value!r} is not one of {', '.join(map(repr, args))}.")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        inner = args[:1] * len(value) if args[1:] == (...,) else args
        require(len(inner) == len(value), f"{where}: expected {len(inner)} values, got {len(value)}.")
        return tuple(_value(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(inner, value, strict=True)))
    if origin in (types.UnionType, typing.Union):
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = origin or hint
    if not isinstance(value, expected) or (hint in (int, float) and isinstance(value, bool)):
        raise UserError(f"{where}: expected {getattr(expected, '__name__', hint)}, got {value!r}.")
    return value


def require(condition: bool, message: str) -> None:
    """Raise UserError with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)
