"""Every setting of a run, in one tree of frozen dataclasses. Nothing else decides what training does.

Configs travel on wires, are hashed into the run's key and written into the LoRA's metadata, so they hold
plain values only. A setting is one field with its one sentence (`setting`); a new one is `added`: at its
default every key stays as it was. `from_dict` refuses unknown keys and suggests the nearest: a misspelled
option that is silently ignored costs a night.
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
Compute = Literal["auto", "full", "int8", "fp8"]

SETTINGS, ADDED = "settings", "added"
"""In the metadata of a field: the settings that people see of it (in most cases one), and whether it is newer
than their files."""


@dataclass(frozen=True)
class Setting:
    """The visible side of a field: a widget, a row in a help page, an input in a job's graph."""

    input: str
    """The widget's id in saved graphs; empty for the field's name."""
    sentence: str
    low: float = 0
    high: float = 1_000_000
    step: float | None = None
    """Of the widget's arrows; 0.01 for a float that has none."""
    multiline: bool = False
    main: bool = False
    """Whether the node that does the work shows it, instead of the node of settings beside it."""
    optional: bool = False
    """Whether graphs may lack it, as those from before do; so do all that are advanced or added."""
    advanced: bool = False
    """Whether editors show it on demand."""
    default: Any = None
    """As of here, what `settings` reads from the field itself."""
    choices: tuple[str, ...] = ()
    added: bool = False


def setting(default: C, sentence: str, *, input: str = "", added: bool = False, **shown: Any) -> C:
    """Return a field that people can set, with the one sentence that says what it is.

    Widget, help page, English name and the default in jobs follow from it. `input` is the widget's id where
    that is not the field's name, `shown` any other field of `Setting`. A Literal is a menu, a tuple a text
    with one entry per line. A new setting is `added`: at its default, digests and files don't name it.
    """
    metadata = {SETTINGS: (Setting(input, sentence, **shown),), **({ADDED: True} if added else {})}
    return field(default=default, metadata=metadata)


def added(default: C) -> C:
    """Return a dataclass field for a new setting: at its default, digests and files do not name it.

    So the runs, caches and files from before are found again. The default can never change: it is what a file
    without the setting was made with.
    """
    return field(default=default, metadata={ADDED: True})


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What is trained: the method, its size, the layers.

    Patterns are globs over module paths; one that begins with "re:" is a regular expression over the whole
    path. In `algorithms`, `ranks`, `alphas` and `lrs` the first pattern that matches a layer decides.
    """

    algorithm: str = setting("lora", "Method; LoRA is the usual choice and loads everywhere.", main=True)
    rank: int = setting(
        16, "Size of the LoRA: 8 to 16 for a face, 32 or more for a style.", low=1, high=1024, main=True
    )
    # LoHa: 1 as in LyCORIS, since both its halves start large. rsLoRA: 4 is strength 1 at rank 16.
    alpha: float = setting(
        0.0,
        "Strength is alpha / rank. 0 is the method's default: alpha = rank, so strength 1; 1 for LoHa, 4 for "
        "rsLoRA.",
        high=4096,
        step=0.5,
        main=True,
    )
    targets: str = setting(
        "attn-mlp",
        "Layers to train: attention and MLP of every block (attn-mlp), attention only (attn), every linear "
        "layer (linear), convolutions too (all), or embeddings as well (everything).",
        main=True,
    )
    include: tuple[str, ...] = setting(
        (),
        "Patterns of layer names, one per line; only these layers are trained, e.g. joint_blocks.1?.*",
        main=True,
        advanced=True,
    )
    exclude: tuple[str, ...] = setting(
        (), "Patterns of layer names, one per line; these layers are not trained.", main=True, optional=True
    )
    # Kalajdzievski 2023, arXiv:2312.03732. Folded into the stored alpha: every loader renders it right.
    rslora: bool = setting(
        False, "Scale by alpha / sqrt(rank) instead of alpha / rank, so that every rank learns equally fast."
    )
    # Meng et al. 2024, arXiv:2404.02948; saved as a difference to the unchanged base.
    init: Literal["default", "gaussian", "pissa"] = setting(
        "default", "Initial weights; pissa starts from the base's principal components."
    )
    dropout: float = setting(0.0, "Share of each layer's inputs set to 0 in a step.", high=0.99)
    rank_dropout: float = setting(
        0.0, "Share of the rank left out in a step; a full LoKr matrix has none.", high=0.99
    )
    module_dropout: float = setting(0.0, "Share of the layers left out in a step.", high=0.99)
    max_norm: float = setting(
        0.0, "Largest norm of a layer's weight change; larger ones are scaled down. 0 is no limit.", high=1000
    )
    # Hayou et al. 2024, arXiv:2402.12354, who recommend 16.
    lora_plus_ratio: float = setting(
        1.0,
        "LoRA+: learning rate of the factor that starts at zero, as a multiple; its authors recommend 16.",
        low=0.01,
        high=1000,
    )
    tucker: bool = setting(
        False, "Convolutions larger than 1x1: decompose the kernel too, for a smaller file."
    )
    factor: int = setting(
        -1, "LoKr: size of the small factor; -1 divides each side as evenly as possible.", low=-1, high=1024
    )
    decompose_both: bool = setting(False, "LoKr: decompose the small factor too.")
    full_matrix: bool = setting(False, "LoKr: decompose neither factor; rank and alpha then have no effect.")
    blocks: str = setting(
        "", 'Blocks to train, counted from 0: "0-11, 18, 30-", or early, middle or late. Empty: all layers.'
    )
    algorithms: tuple[tuple[str, str], ...] = setting(
        (),
        "Algorithms by layer, one per line: pattern = algorithm, e.g. *mlp* = lokr. The first match counts.",
    )
    ranks: tuple[tuple[str, int], ...] = setting(
        (), "Ranks by layer, one per line: pattern = rank, e.g. *mlp* = 8. The first match counts."
    )
    alphas: tuple[tuple[str, float], ...] = setting(
        (), "Alphas by layer, one per line: pattern = alpha, e.g. *mlp* = 4. The first match counts."
    )
    lrs: tuple[tuple[str, float], ...] = setting(
        (),
        "Learning rates by layer, one per line: pattern = multiple of the learning rate, e.g. *attn* = 0.5. "
        "The first match counts.",
        input="learning_rates",
    )
    start_from: str = ""
    """LoRA file to start from, by its name in ComfyUI's list; empty starts a new LoRA."""
    start_size: Literal["file", "settings"] = "file"
    """Source of algorithm, rank and alpha with `start_from`: the file, or these settings, to which the file's
    layers are padded."""
    text_encoder: float = setting(
        0.0,
        "Learning rate of the CLIP text encoders, as a multiple: 0.1 to 0.5 is usual, 0 doesn't train them. "
        "Train Steps then needs CLIP, and encodes captions in every step.",
        high=10,
        step=0.05,
        main=True,
        optional=True,
    )

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
            require(0 <= share < 1, f"{name} must be at least 0 and below 1, got {share}; 0 turns it off.")
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
            "PiSSA starts from the base's principal components and does not support max_norm or tucker: set "
            "them to 0 and off, or init to 'default'.",
        )
        require(
            self.factor == -1 or self.factor >= 2,
            f"factor must be at least 2, or -1 to divide the weight evenly; got {self.factor}.",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How the adapter's weights are updated."""

    name: str = setting(
        "adamw",
        "Optimizer; AdamW suits most LoRAs. The 8-bit ones need bitsandbytes; prodigy finds its own rate "
        "(set the learning rate to 1).",
        input="optimizer",
    )
    lr: float = setting(
        1e-4,
        "Learning rate; 1e-4 suits most LoRAs. Halve it when images break up, double it when nothing "
        "happens.",
        input="learning_rate",
        high=10,
        step=1e-6,
        main=True,
    )
    weight_decay: float = setting(
        0.01, "Pull of the weights toward 0, as a multiple of the learning rate.", high=1
    )
    betas: tuple[float, float] = field(
        default=(0.9, 0.99),
        metadata={
            SETTINGS: (
                Setting(
                    "beta1",
                    "Beta 1: decay of the running mean of gradients (Adam, Lion); momentum for SGD.",
                    high=0.9999,
                    step=0.001,
                    advanced=True,
                ),
                Setting(
                    "beta2",
                    "Beta 2: decay of the running mean of squared gradients (Adam, Lion).",
                    high=0.99999,
                    step=0.0001,
                    advanced=True,
                ),
            )
        },
    )
    eps: float = setting(
        1e-8,
        "Adam's epsilon: a small number added to the denominator of each step.",
        low=1e-16,
        high=1,
        step=1e-9,
        advanced=True,
    )
    max_grad_norm: float = setting(
        1.0, "Gradient clipping: larger gradients are scaled down to this norm; 0 turns it off.", high=1000
    )
    d_coef: float = setting(
        1.0,
        "Prodigy: multiple of the learning rate it finds; 0.5 is more careful, 2 is bolder.",
        low=0.01,
        high=100,
    )
    package_class: str = setting(
        "",
        "Optimizer of an installed package, in place of the one above: package.Class, e.g. "
        "pytorch_optimizer.Adan. It gets the learning rate, and everything else from its arguments.",
        added=True,
        advanced=True,
    )
    arguments: str = setting(
        "",
        'Arguments of that class as JSON, e.g. {"weight_decay": 0.01}.',
        added=True,
        advanced=True,
    )
    # In bf16 each step is computed in float32 and rounded up or down at random, so small steps are not lost.
    weights: Literal["fp32", "bf16"] = setting(
        "fp32", "Number format of the LoRA's weights during training; bf16 halves them and their gradients."
    )

    @property
    def title(self) -> str:
        """The optimizer's name, for people and in saved states."""
        return self.package_class or self.name

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
    """The learning rate over the whole run, as a multiple of `OptimizerConfig.lr`."""

    name: str = setting(
        "constant",
        "Schedule of the learning rate over the total steps of the run.",
        input="schedule",
    )
    warmup_steps: int = setting(0, "Steps over which the learning rate rises to its full value.")
    total_steps: int = setting(
        0,
        "Length of the whole run, over which the learning rate decays; set it when several Train Steps "
        "follow one another. 0: the run ends with this node.",
        main=True,
    )
    floor: float = setting(0.0, "End of the decay, as a multiple of the learning rate.", high=1)
    cycles: int = setting(1, "Number of cycles (schedule restarts).", low=1, high=1000)
    power: float = setting(
        1.0,
        "Exponent (schedule polynomial): 1 is a straight line, 2 falls early, 0.5 falls late.",
        low=0.01,
        high=10,
    )

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, f"warmup must not be negative, got {self.warmup_steps} steps.")
        require(self.total_steps >= 0, f"total steps must not be negative, got {self.total_steps}.")
        require(0 <= self.floor <= 1, f"floor must be 0 to 1, got {self.floor}; 0.1 ends at a tenth.")
        require(self.cycles >= 1, f"cycles must be at least 1, got {self.cycles}.")
        require(math.isfinite(self.power) and self.power > 0, f"power must be above 0, got {self.power}.")


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """A moving average of the weights: smoother, and often better, than those of the last step."""

    decay: float = setting(
        0.0,
        "Decay of a moving average of the weights, which becomes the result; 0 turns it off, 0.999 suits "
        "long runs.",
        input="ema_decay",
        high=0.9999,
        step=0.0001,
    )
    # 1 - (1 + step) ** -power; the first steps are soon forgotten.
    power: float = setting(
        0.75,
        "How fast the moving average's decay rises to ema_decay: larger is faster.",
        input="ema_power",
        low=0.01,
        high=1,
        advanced=True,
    )

    def __post_init__(self) -> None:
        require(0 <= self.decay < 1, f"EMA decay must be 0 (off) or more and below 1, got {self.decay}.")
        require(self.power > 0, f"EMA power must be above 0, got {self.power}; 0.75 is usual.")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """When held-out images are measured during a run, and when the run stops early."""

    every: int = setting(0, "Steps between two measurements.")
    patience: int = setting(
        0,
        "Early stopping: the run ends after this many measurements without a new lowest loss; 0 never does.",
        high=10_000,
    )
    limit: int = setting(0, "Number of held-out images to measure; 0 measures all.")
    result: Literal["last", "best"] = setting(
        "last", "State to hand on: the last step's, or the one with the lowest validation loss."
    )

    def __post_init__(self) -> None:
        for name in ("every", "patience", "limit"):
            value = getattr(self, name)
            require(value >= 0, f"validation {name} must not be negative, got {value}.")
        require(self.every > 0 or not self.patience, "patience needs validation: set 'every' above 0.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often a run saves itself, and how many checkpoints it keeps. Does not affect the result."""

    minutes: float = setting(5.0, "Longest time between two checkpoints; 0 saves every step.", high=1440)
    steps: int = setting(250, "Steps between two checkpoints; 0 goes by time alone.")
    keep: int = setting(
        4,
        "Number of those checkpoints to keep, besides the last two and the best; older LoRA files stay.",
        low=1,
        high=1000,
    )
    lora: bool = setting(True, "Write a LoRA file with each checkpoint, in bf16, to try it out.")
    sqlite: bool = setting(
        False, "Write the log as a SQLite file too: log.sqlite in the run's folder.", optional=True
    )

    def __post_init__(self) -> None:
        require(self.minutes >= 0, f"minutes between checkpoints must not be negative, got {self.minutes}.")
        require(self.steps >= 0, f"steps between checkpoints must not be negative, got {self.steps}.")
        require(self.keep >= 1, f"keep must be at least 1, got {self.keep}; 4 is usual.")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What sample images look like, and how often they are drawn. Does not affect the training."""

    negative: str = setting("", "Negative prompt: what the images should not show.", multiline=True)
    every: int = setting(100, "Steps between two sets of images; 0 draws none.")
    before_training: bool = setting(True, "Draw a first set before the first step, for comparison.")
    width: int = setting(1024, "Width of an image in pixels.", low=16, high=16384, step=16)
    height: int = setting(1024, "Height of an image in pixels.", low=16, high=16384, step=16)
    steps: int = setting(20, "Sampling steps.", low=1, high=10_000)
    cfg: float = setting(
        0.0,
        "Guidance scale. 0 is the model's own: 1 for distilled models such as Flux and Turbo models, 4 for "
        "others.",
        high=100,
        step=0.1,
    )
    sampler: str = setting("euler", "Sampler, as in KSampler; euler suits most models.")
    scheduler: str = setting("simple", "Noise schedule, as in KSampler.")
    seed: int = 0
    frames: int = setting(
        1,
        "Frames of a sample: 1 draws images, more draw clips with a video model.",
        low=1,
        high=10_000,
        added=True,
    )
    fps: float = setting(16.0, "Frames per second at which sample clips play.", low=1, high=240, added=True)
    seconds: float = setting(
        10.0, "Seconds of a sample, for models that make sound.", low=0.1, high=3600, step=0.1, added=True
    )
    walk_seed: bool = setting(
        False, "Use another seed for every set. Otherwise sets differ by the training alone."
    )
    guidance: float = setting(
        -1.0,
        "Guidance input of guidance-distilled models, as Flux Guidance sets it; -1 is the model's own.",
        low=-1,
        high=100,
        step=0.1,
    )


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Noise levels to train at, noise to add, and the loss.

    Levels are the part of x_t that is noise, 0 (clean) to 1 (pure noise), whatever the model's sigmas are.
    """

    sigmas: str = setting("auto", "Distribution of noise levels; auto is the model's own.")
    shift: float = setting(
        0.0,
        "Shift toward high noise (above 1: composition) or low noise (below 1: detail). 0 is the model's "
        "own.",
        high=20,
    )
    resolution_shift: Literal["auto", "none", "flux", "sd3", "ltx"] = setting(
        "auto", "How the shift grows with the image size; auto is the model's own where shift is 0."
    )
    mean: float = setting(
        0.0,
        "Mean of the normal distribution (sigmas logit-normal); above 0 favors high noise.",
        low=-10,
        high=10,
    )
    std: float = setting(
        1.0,
        "Standard deviation (sigmas logit-normal and sigmoid); large values favor both ends.",
        low=0.01,
        high=10,
    )
    mode_scale: float = setting(
        1.29, "Density of the middle (sigmas mode); negative values thin it out.", low=-1, high=1.75
    )
    bias: float = setting(
        0.0,
        "Bias toward high noise (above 0) or low noise (below 0); 1 triples the odds of the upper half.",
        low=-8,
        high=8,
    )
    min_noise: float = setting(
        0.0, "Lowest noise level to train at, from 0 (clean) to 1 (pure noise).", high=1
    )
    max_noise: float = setting(1.0, "Highest noise level to train at.", high=1)
    noise_range: Literal["squeeze", "cut"] = setting(
        "squeeze",
        "What min_noise and max_noise do: squeeze the whole distribution into their range, or cut out the "
        "part that lies in it, as for an expert of Wan 2.2.",
        added=True,
    )
    stratified: bool = setting(
        True, "Spread the noise levels of a batch evenly: less variance, same mean loss."
    )
    loss: str = setting("mse", "Loss of an error; huber forgives outliers.")
    huber_delta: float = setting(
        0.1,
        "Error at which the loss turns from quadratic to linear (loss huber and pseudo-huber).",
        low=0.001,
        high=10,
    )
    space: str = setting("auto", "Quantity the loss compares; auto is the model's own.")
    weighting: str = setting("none", "Weighting of the loss by noise level.")
    min_snr_gamma: float = setting(
        5.0,
        "Highest signal-to-noise ratio that counts in full (weighting min-snr); 5 is usual.",
        low=0.1,
        high=100,
    )
    noise_offset: float = setting(
        0.0,
        "Strength of a constant added to each channel of the noise, for very dark and bright images; 0.05 is "
        "usual.",
        high=1,
    )
    pyramid_noise: float = setting(
        0.0, "Strength of noise at coarser sizes, added to the noise; 0.3 is usual.", high=0.99
    )
    input_perturbation: float = setting(
        0.0, "Strength of extra noise in the input that the target ignores; 0.1 is usual.", high=1
    )
    differential_guidance: float = setting(
        1.0,
        "Distance of the target from the prediction, as a multiple; 1 turns it off, 3 is usual.",
        low=0.01,
        high=100,
    )
    guidance: float = setting(
        -1.0,
        "Guidance input of guidance-distilled models (Flux Dev); -1 is the model's own.",
        low=-1,
        high=100,
    )
    # ostris/ai-toolkit, "differential output preservation"; OneTrainer, "prior prediction".
    preservation: float = setting(
        0.0,
        "Preservation: weight of a loss that keeps the model as it is for captions with the class word in "
        "place of the trigger (Dataset Settings), or empty ones. 0 turns it off, 1 is usual.",
        high=1000,
        added=True,
    )
    preservation_share: float = setting(
        1.0,
        "Share of the steps with preservation, which then counts that much more: 0.5 halves its cost.",
        low=0.01,
        high=1,
        added=True,
    )

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
        require(self.shift >= 0, f"shift must be positive, or 0 for the model's own; got {self.shift}.")
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
            0 <= self.preservation <= 1000,
            f"preservation must be 0 (off) to 1000, got {self.preservation}; 1 is usual.",
        )
        require(
            0.01 <= self.preservation_share <= 1,
            f"preservation_share must be 0.01 to 1, got {self.preservation_share}; 1 is every step.",
        )
        require(
            self.guidance >= 0 or self.guidance == -1,
            f"guidance must be 0 or more, or -1 for the model's own; got {self.guidance}.",
        )


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Precision, recomputation, and where weights are."""

    dtype: DType = setting(
        "auto",
        "Number format of the forward pass; auto is bf16 where the device supports it, else fp16 (fp32 on "
        "the CPU). The LoRA's own weights are fp32 unless Optimizer Settings say bf16.",
        input="precision",
    )
    checkpointing: str = setting(
        "auto",
        "What the backward pass recomputes instead of reading it from memory: selective costs a little time, "
        "block up to half more time for far less memory, block-offload needs even less. auto is the fastest "
        "that fits.",
    )
    base: str = setting(
        "auto",
        "Where the base's weights are during training: on the device (resident), in host memory (offload), "
        "in their .safetensors file (stream, for a base larger than host memory), shared out among several "
        "GPUs (sharded), or quantized to 8 bits (fp8, int8) or 4 bits (nf4). auto is the faster of resident "
        "and offload that fits; only quantization changes the result.",
    )
    budget_gb: float = setting(
        0.0, "Device memory for training, in GiB; 0 is all that is free.", high=1024, step=0.5
    )
    compile: bool = setting(
        False,
        "Compile the model's blocks: a few minutes at the start for faster steps afterward. Needs a C++ "
        "compiler on the CPU and Triton on NVIDIA; if that fails, training continues without it.",
    )
    compute: Compute = setting(
        "auto",
        "How the base's weights are multiplied: in the precision above (full), or in 8 bits in both passes, "
        "which is faster, takes half the memory, and changes results by about 1 % (int8) or 3 % (fp8). auto "
        "is 8 bits only where the base's file has them and this device is faster so.",
        added=True,
    )

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.budget_gb) and self.budget_gb >= 0,
            f"the memory budget must be above 0 GiB, or 0 for all that is free; got {self.budget_gb}.",
        )

    def deciding(self) -> MemoryConfig:
        """Return the settings that change a run's result: number formats and quantization, not placement."""
        rounds = self.base not in ("resident", "offload", "stream", "sharded")
        return replace(self, checkpointing="auto", base=self.base if rounds else "auto", budget_gb=0.0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run. Equal configs, datasets, bases and starts give equal results: bit for bit where kernels add in
    one order, as on the CPU."""

    batch_size: int = setting(1, "Images in one step; more need more memory.", low=1, high=256, main=True)
    gradient_accumulation: int = setting(
        1, "Batches averaged into one step: a larger batch without its memory.", low=1, high=1024
    )
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


def settings(kind: type, *, main: bool | None = None) -> list[Setting]:
    """Return every setting of a config class and of the configs in it.

    `main` chooses those of the node that does the work, or those of the node of settings.
    """
    hints, rows = typing.get_type_hints(kind), []
    for item in dataclasses.fields(kind):
        if isinstance(item.default_factory, type):
            rows += settings(item.default_factory, main=main)
        choices = typing.get_args(hints[item.name]) if typing.get_origin(hints[item.name]) is Literal else ()
        shown, whole = item.metadata.get(SETTINGS, ()), typing.cast(Any, item.default)
        for each, default in zip(shown, whole if len(shown) > 1 else [whole]):
            if main in (None, each.main):
                read = {"default": default, "choices": choices, "added": ADDED in item.metadata}
                rows.append(replace(each, input=each.input or item.name, **read))
    return rows


def inputs_of(config: Any) -> dict[str, Any]:
    """Return {widget's id: value} of every setting of a config and of the configs in it."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value, shown = getattr(config, item.name), item.metadata.get(SETTINGS, ())
        if dataclasses.is_dataclass(value):
            values |= inputs_of(value)
        for each, part in zip(shown, value if len(shown) > 1 else [value]):
            values[each.input or item.name] = part
    return values


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
    """Return the error for an unknown key, with the known keys that may be meant."""
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
