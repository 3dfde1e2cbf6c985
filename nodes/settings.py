"""Optional settings, one frozen value a node. Without them the model's family decides."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.config import (
    CheckpointConfig,
    EmaConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
)
from ..training.data.config import AugmentConfig, BucketConfig, CaptionConfig, DatasetConfig, MaskConfig
from ..training.memory.activation_checkpointing import MODES
from ..training.memory.weight_store import STORES
from ..training.objective.sigmas import RESOLUTION_SHIFTS, SIGMAS
from ..training.objective.weighting import LOSSES, SPACES, WEIGHTINGS
from ..training.optimizer.build import OPTIMIZERS
from ..training.optimizer.schedule import SCHEDULES
from .node import Node
from .sockets import (
    Checkpoints,
    Dataset,
    DatasetSettings,
    HeldOut,
    Memory,
    Objective,
    Optimizer,
    Saving,
    Validation,
    encoded,
    schema,
)
from .widgets import advanced, lines, widget


class DatasetSettingsNode(Node):
    """Captions, buckets, crops, colors and masks, beyond what Load Dataset shows."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftDatasetSettings",
            display_name="Dataset Settings",
            description="How captions are read and varied, how pictures are sized, cropped and masked.",
            search_aliases=["graft", "tags", "shuffle", "bucket", "mask", "regularisation"],
            inputs=[
                io.Combo.Input(
                    "captions_from",
                    options=["auto", "txt", "caption", "json", "jsonl", "file name", "folder name"],
                    default="auto",
                    tooltip="Where captions come from; auto takes the first of .txt, .caption, .json, "
                    "metadata.jsonl.",
                ),
                io.String.Input("prefix", default="", tooltip="Put before every caption."),
                io.String.Input("suffix", default="", tooltip="Put after every caption."),
                io.Boolean.Input(
                    "shuffle_tags", default=False, tooltip="Show comma-separated tags in several orders."
                ),
                io.Int.Input(
                    "keep_tags",
                    default=0,
                    min=0,
                    max=100,
                    tooltip="The first tags, which stay where they are.",
                ),
                io.Float.Input(
                    "tag_dropout",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    tooltip="Chance of each tag to be left out.",
                ),
                io.String.Input(
                    "remove_tags",
                    default="",
                    multiline=True,
                    tooltip="Patterns of tags that are taken out of every caption, one a line, e.g. "
                    "*background",
                ),
                io.Combo.Input(
                    "crop",
                    options=["center", "random", "corners"],
                    default="center",
                    tooltip="What is kept of a picture.",
                ),
                io.Boolean.Input(
                    "square", default=False, tooltip="Crop everything to a square: no aspect-ratio buckets."
                ),
                io.Boolean.Input(
                    "upscale", default=True, tooltip="Enlarge pictures that are smaller than their bucket."
                ),
                io.Int.Input(
                    "min_side", default=0, min=0, max=16384, tooltip="Pixels; 0 is half the resolution."
                ),
                io.Int.Input(
                    "max_side", default=0, min=0, max=16384, tooltip="Pixels; 0 is twice the resolution."
                ),
                *(
                    io.Float.Input(
                        name,
                        default=0.0,
                        min=0.0,
                        max=limit,
                        step=0.01,
                        tooltip=f"Share by which {name} is changed at random; variations are encoded and "
                        "kept.",
                    )
                    for name, limit in (
                        ("brightness", 1.0),
                        ("contrast", 1.0),
                        ("saturation", 1.0),
                        ("hue", 0.5),
                    )
                ),
                io.Combo.Input(
                    "masks",
                    options=["file", "off", "alpha", "auto"],
                    default="file",
                    tooltip="What counts in a picture: name-mask.png beside it, or its transparency. White "
                    "counts.",
                ),
                io.Float.Input(
                    "outside_mask",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Loss weight where the mask is black.",
                ),
                io.Float.Input(
                    "weight",
                    default=1.0,
                    min=0.001,
                    max=1000.0,
                    step=0.01,
                    tooltip="Loss weight of these images.",
                ),
                io.Boolean.Input(
                    "regularisation",
                    default=False,
                    tooltip="Images of the class in general that hold the model where it was; never given "
                    "the trigger.",
                ),
                io.String.Input("background", default="#ffffff", tooltip="Color under transparent pictures."),
            ],
            outputs=[DatasetSettings.Output("dataset_settings")],
        )

    @classmethod
    def execute(cls, **w: Any) -> io.NodeOutput:
        return io.NodeOutput(
            DatasetConfig(
                weight=w["weight"],
                regularisation=w["regularisation"],
                background=w["background"],
                caption=CaptionConfig(
                    source=w["captions_from"],
                    prefix=w["prefix"],
                    suffix=w["suffix"],
                    remove=lines(w["remove_tags"]),
                    shuffle=w["shuffle_tags"],
                    keep_tokens=w["keep_tags"],
                    tag_dropout=w["tag_dropout"],
                ),
                bucket=BucketConfig(
                    square=w["square"], upscale=w["upscale"], min_side=w["min_side"], max_side=w["max_side"]
                ),
                augment=AugmentConfig(
                    crop=w["crop"],
                    brightness=w["brightness"],
                    contrast=w["contrast"],
                    saturation=w["saturation"],
                    hue=w["hue"],
                ),
                mask=MaskConfig(source=w["masks"], outside=w["outside_mask"]),
            )
        )


class OptimizerSettings(Node):
    """How the weights move."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftOptimizerSettings",
            display_name="Optimizer Settings",
            description="Optimizer, learning-rate schedule, clipping, accumulation and moving average.",
            search_aliases=["graft", "adamw", "prodigy", "schedule", "warmup", "ema"],
            inputs=[
                io.Combo.Input(
                    "optimizer",
                    options=list(OPTIMIZERS),
                    default="adamw",
                    tooltip="AdamW suits most LoRAs. The 8-bit ones need bitsandbytes; prodigy finds its own "
                    "rate (set the learning rate to 1).",
                ),
                io.Combo.Input(
                    "schedule",
                    options=list(SCHEDULES),
                    default="constant",
                    tooltip="Course of the learning rate over the total steps of the run.",
                ),
                widget(
                    ScheduleConfig,
                    "warmup_steps",
                    "Steps over which the learning rate rises to its full value.",
                ),
                widget(
                    OptimizerConfig,
                    "weight_decay",
                    "Pull of the weights towards 0, times the learning rate.",
                    high=1,
                ),
                widget(
                    OptimizerConfig,
                    "max_grad_norm",
                    "Gradients longer than this are scaled down to it; 0 switches clipping off.",
                    high=1000,
                ),
                widget(
                    TrainConfig,
                    "gradient_accumulation",
                    "Batches averaged into one step: a larger batch without its memory.",
                    low=1,
                    high=1024,
                ),
                widget(
                    ScheduleConfig,
                    "floor",
                    "What the decay ends at, as a multiple of the learning rate.",
                    high=1,
                ),
                widget(
                    ScheduleConfig,
                    "cycles",
                    "Of restarts: how many times the course is run.",
                    low=1,
                    high=1000,
                ),
                widget(ScheduleConfig, "power", "Of polynomial: 1 is a straight line.", low=0.01, high=10),
                io.Float.Input(
                    "ema_decay",
                    default=EmaConfig().decay,
                    min=0.0,
                    max=0.9999,
                    step=0.0001,
                    round=False,
                    tooltip="Keep a moving average of the weights, and hand it on: 0 is off, 0.999 suits "
                    "long runs.",
                ),
                widget(
                    OptimizerConfig,
                    "weights",
                    "Format of the LoRA's weights while training; bf16 halves large ones.",
                    options=["fp32", "bf16"],
                ),
                widget(
                    OptimizerConfig, "d_coef", "Of prodigy: multiplies the rate it finds.", low=0.01, high=100
                ),
                *map(advanced, _moments()),
            ],
            outputs=[Optimizer.Output("optimizer_settings")],
        )

    @classmethod
    def execute(
        cls,
        optimizer: str,
        schedule: str,
        ema_decay: float,
        gradient_accumulation: int,
        beta1: float = OptimizerConfig.betas[0],
        beta2: float = OptimizerConfig.betas[1],
        eps: float = OptimizerConfig.eps,
        ema_power: float = EmaConfig.power,
        **w: Any,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            TrainConfig(
                gradient_accumulation=gradient_accumulation,
                optimizer=OptimizerConfig(
                    name=optimizer,
                    weight_decay=w["weight_decay"],
                    max_grad_norm=w["max_grad_norm"],
                    betas=(beta1, beta2),
                    eps=eps,
                    d_coef=w["d_coef"],
                    weights=w["weights"],
                ),
                schedule=ScheduleConfig(
                    name=schedule,
                    warmup_steps=w["warmup_steps"],
                    floor=w["floor"],
                    cycles=w["cycles"],
                    power=w["power"],
                ),
                ema=EmaConfig(decay=ema_decay, power=ema_power),
            )
        )


def _moments() -> list[Any]:
    """Return the inputs for how long an optimizer and the moving average remember."""
    first, second = OptimizerConfig.betas
    remember = "Share of its running mean of the {} that a step keeps, in Adam, Lion and their like{}."
    return [
        io.Float.Input(
            "beta1", default=first, min=0.0, max=0.9999, step=0.001, round=False, optional=True,
            tooltip=remember.format("gradients", "; of sgd: the momentum"),
        ),
        io.Float.Input(
            "beta2", default=second, min=0.0, max=0.99999, step=0.0001, round=False, optional=True,
            tooltip=remember.format("squared gradients", ""),
        ),
        io.Float.Input(
            "eps", default=OptimizerConfig.eps, min=1e-16, max=1.0, step=1e-9, round=False, optional=True,
            tooltip="Of Adam and its like: added to what a step is divided by.",
        ),
        io.Float.Input(
            "ema_power", default=EmaConfig.power, min=0.01, max=1.0, step=0.01, round=False, optional=True,
            tooltip="How fast the moving average's memory grows to ema_decay.",
        ),
    ]  # fmt: skip


class ObjectiveSettings(Node):
    """Which noise levels are practised, and how the error counts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftObjectiveSettings",
            display_name="Objective Settings",
            description="How noise levels are drawn, what noise is added, and how the error counts.",
            search_aliases=["graft", "timestep", "sigma", "shift", "min-snr", "huber", "noise offset"],
            inputs=[
                widget(
                    ObjectiveConfig,
                    "sigmas",
                    "How noise levels are drawn; auto takes what suits the model's family.",
                    options=["auto", *SIGMAS],
                ),
                widget(
                    ObjectiveConfig,
                    "shift",
                    "Above 1 favors high noise: composition over detail. 0 takes the family's value.",
                    high=20,
                ),
                widget(
                    ObjectiveConfig,
                    "resolution_shift",
                    "How the shift follows the size of the image.",
                    options=["auto", *RESOLUTION_SHIFTS],
                ),
                widget(
                    ObjectiveConfig, "mean", "Of logit-normal: above 0 favors high noise.", low=-10, high=10
                ),
                widget(
                    ObjectiveConfig,
                    "std",
                    "Of logit-normal and sigmoid: large values favor both ends.",
                    low=0.01,
                    high=10,
                ),
                widget(
                    ObjectiveConfig,
                    "mode_scale",
                    "Of mode: how much denser the middle is.",
                    low=-1,
                    high=1.75,
                ),
                widget(
                    ObjectiveConfig, "bias", "Above 0 favors high noise, below 0 low noise.", low=-8, high=8
                ),
                widget(
                    ObjectiveConfig,
                    "min_noise",
                    "Lowest noise level practised, as a share of all noise.",
                    high=1,
                ),
                widget(ObjectiveConfig, "max_noise", "Highest noise level practised.", high=1),
                widget(
                    ObjectiveConfig, "stratified", "Spread the levels of a batch evenly: a steadier loss."
                ),
                widget(
                    ObjectiveConfig,
                    "loss",
                    "How an error counts; huber forgives outliers.",
                    options=list(LOSSES),
                ),
                widget(
                    ObjectiveConfig,
                    "huber_delta",
                    "Where huber turns from square to straight.",
                    low=0.001,
                    high=10,
                ),
                widget(
                    ObjectiveConfig,
                    "space",
                    "What the error is measured in; auto takes the family's.",
                    options=["auto", *SPACES],
                ),
                widget(ObjectiveConfig, "weighting", "How noise levels count.", options=list(WEIGHTINGS)),
                widget(ObjectiveConfig, "min_snr_gamma", "Of min-snr: 5 is usual.", low=0.1, high=100),
                widget(
                    ObjectiveConfig,
                    "noise_offset",
                    "Helps with very dark and bright pictures; 0.05 is usual.",
                    high=1,
                ),
                widget(ObjectiveConfig, "pyramid_noise", "Noise at several sizes; 0.3 is usual.", high=0.99),
                widget(
                    ObjectiveConfig,
                    "input_perturbation",
                    "Extra noise the target does not know of; 0.1 is usual.",
                    high=1,
                ),
                widget(
                    ObjectiveConfig,
                    "differential_guidance",
                    "Moves the target this many times as far from the prediction; 1 is off.",
                    low=0.01,
                    high=100,
                ),
                widget(
                    ObjectiveConfig,
                    "guidance",
                    "Guidance input of guidance-distilled models (Flux Dev); -1 takes the family's.",
                    low=-1,
                    high=100,
                ),
            ],
            outputs=[Objective.Output("objective_settings")],
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(ObjectiveConfig(**values))


class MemorySettings(Node):
    """Precision, what is kept or recomputed, and where the frozen weights are."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftMemorySettings",
            display_name="Memory Settings",
            description="Number format of the forward pass, checkpointing, and where the base is kept.",
            search_aliases=["graft", "vram", "bf16", "checkpointing", "offload", "block swap", "nf4", "fp8"],
            inputs=[
                io.Combo.Input(
                    "precision",
                    options=["auto", "bf16", "fp16", "fp32"],
                    default="auto",
                    tooltip="Number format of the forward pass. The LoRA's own weights are fp32 unless "
                    "Optimizer Settings say bf16.",
                ),
                widget(
                    MemoryConfig,
                    "checkpointing",
                    "What is recomputed in the backward pass instead of kept: selective costs a little "
                    "time, block up to half more and far less memory, block-offload less still. auto takes "
                    "the fastest that fits.",
                    options=["auto", *MODES],
                ),
                widget(
                    MemoryConfig,
                    "base",
                    "Where the base's weights are while training: on the device (resident), in host memory "
                    "(offload), or rounded to 8 bits (fp8, int8) or 4 (nf4). auto takes the fastest of "
                    "resident and offload that fits; only rounding changes the result.",
                    options=["auto", *STORES],
                ),
                widget(
                    MemoryConfig,
                    "budget_gb",
                    "Memory of the device that training may take, in GiB. 0 is all that is free.",
                    high=1024,
                    step=0.5,
                ),
                widget(
                    MemoryConfig,
                    "compile",
                    "Compile the model's blocks: some minutes at the start for faster steps afterwards. "
                    "Needs a C++ compiler on the CPU and Triton on NVIDIA; if that fails, training goes on "
                    "without.",
                ),
            ],
            outputs=[Memory.Output("memory_settings")],
        )

    @classmethod
    def execute(cls, precision: Any, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(MemoryConfig(dtype=precision, **values))


class ValidationSettings(Node):
    """Measure held-out images during a run, and stop when it has learned enough."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftValidationSettings",
            display_name="Validation Settings",
            description="Measure the loss on images that are not trained on, keep the best state, stop in "
            "time.",
            search_aliases=["graft", "early stop", "held-out", "best"],
            inputs=[
                Dataset.Input(
                    "validation", tooltip="Encoded images that are not trained on, from Split Dataset."
                ),
                io.Int.Input(
                    "every", default=50, min=1, max=1_000_000, tooltip="Steps between two measurements."
                ),
                widget(
                    ValidationConfig,
                    "patience",
                    "End the run after this many measurements without a new lowest loss; 0 never does.",
                    high=10_000,
                ),
                widget(
                    ValidationConfig, "limit", "Measure this many images only; 0 takes all.", high=1_000_000
                ),
                widget(
                    ValidationConfig,
                    "result",
                    "Which state is handed on: the last step's, or that of the lowest loss.",
                    options=["last", "best"],
                ),
            ],
            outputs=[Validation.Output("validation_settings")],
        )

    @classmethod
    def execute(cls, validation: Any, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(HeldOut(ValidationConfig(**values), encoded(validation, "validation")))


class CheckpointSettings(Node):
    """How often a run saves itself."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftCheckpointSettings",
            display_name="Checkpoint Settings",
            description="How often a run saves itself, and how much of that is kept.",
            search_aliases=["graft", "save every", "tensorboard"],
            inputs=[
                widget(
                    CheckpointConfig,
                    "minutes",
                    "Longest time between two checkpoints; 0 saves every step.",
                    high=1440,
                ),
                widget(CheckpointConfig, "steps", "Save every so many steps as well; 0 goes by time alone."),
                widget(
                    CheckpointConfig,
                    "keep",
                    "How many of those are kept, besides the last two and the best; older LoRA files stay.",
                    low=1,
                    high=1000,
                ),
                io.Boolean.Input(
                    "tensorboard", default=False, tooltip="Write a TensorBoard log into the run's folder."
                ),
                widget(CheckpointConfig, "lora", "Write each checkpoint's LoRA file, to try it out."),
                io.Boolean.Input(
                    "sqlite",
                    default=False,
                    optional=True,
                    tooltip="Write the log as a SQLite file too: log.sqlite in the run's folder.",
                ),
            ],
            outputs=[Checkpoints.Output("checkpoint_settings")],
        )

    @classmethod
    def execute(cls, tensorboard: bool, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(Saving(CheckpointConfig(**values), tensorboard))
