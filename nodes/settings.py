"""Optional settings, one frozen value a node. Without them the model's family decides."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.config import MemoryConfig, ObjectiveConfig, OptimizerConfig, ScheduleConfig
from ..training.data.config import AugmentConfig, BucketConfig, CaptionConfig, DatasetConfig, MaskConfig
from ..training.objective import SIGMAS
from ..training.optimizer import OPTIMIZERS
from ..training.schedule import SCHEDULES
from .sockets import DatasetSettings, Memory, Objective, Optimizer, schema


class DatasetSettingsNode(io.ComfyNode):
    """Captions, buckets, crops, colours and masks, beyond what Load Dataset shows."""

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
                        f"kept.",
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
                io.String.Input(
                    "background", default="#ffffff", tooltip="Colour under transparent pictures."
                ),
            ],
            outputs=[DatasetSettings.Output("dataset_settings")],
        )

    @classmethod
    def execute(cls, **w: Any) -> io.NodeOutput:
        remove = tuple(line.strip() for line in w["remove_tags"].splitlines() if line.strip())
        return io.NodeOutput(
            DatasetConfig(
                weight=w["weight"],
                regularisation=w["regularisation"],
                background=w["background"],
                caption=CaptionConfig(
                    source=w["captions_from"],
                    prefix=w["prefix"],
                    suffix=w["suffix"],
                    remove=remove,
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


class OptimizerSettings(io.ComfyNode):
    """How the weights move."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftOptimizerSettings",
            display_name="Optimizer Settings",
            description="Optimizer, learning-rate schedule, clipping and accumulation.",
            search_aliases=["graft", "adamw", "schedule", "warmup"],
            inputs=[
                io.Combo.Input(
                    "optimizer", options=list(OPTIMIZERS), default="adamw", tooltip="AdamW suits most LoRAs."
                ),
                io.Combo.Input(
                    "schedule",
                    options=list(SCHEDULES),
                    default="constant",
                    tooltip="Course of the learning rate over the total steps of the run.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    default=0,
                    min=0,
                    max=100000,
                    tooltip="Steps over which the learning rate rises from 0 to its full value.",
                ),
                io.Float.Input(
                    "weight_decay",
                    default=0.01,
                    min=0.0,
                    max=1.0,
                    step=0.001,
                    tooltip="Pull of the weights towards 0 per step, times the learning rate.",
                ),
                io.Float.Input(
                    "max_grad_norm",
                    default=1.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    tooltip="Gradients longer than this are scaled down to it; 0 switches clipping off.",
                ),
                io.Int.Input(
                    "gradient_accumulation",
                    default=1,
                    min=1,
                    max=1024,
                    tooltip="Batches whose gradients are averaged into one step: a larger batch without its "
                    "memory.",
                ),
            ],
            outputs=[Optimizer.Output("optimizer_settings")],
        )

    @classmethod
    def execute(
        cls,
        optimizer: str,
        schedule: str,
        warmup_steps: int,
        weight_decay: float,
        max_grad_norm: float,
        gradient_accumulation: int,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            (
                OptimizerConfig(optimizer, weight_decay=weight_decay, max_grad_norm=max_grad_norm),
                ScheduleConfig(schedule, warmup_steps=warmup_steps),
                gradient_accumulation,
            )
        )


class ObjectiveSettings(io.ComfyNode):
    """Which noise levels are practised."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftObjectiveSettings",
            display_name="Objective Settings",
            description="How noise levels are drawn during training.",
            search_aliases=["graft", "timestep", "sigma", "shift"],
            inputs=[
                io.Combo.Input(
                    "sigmas",
                    options=["auto", *SIGMAS],
                    default="auto",
                    tooltip="Distribution of noise levels; auto takes what suits the model's family.",
                ),
                io.Float.Input(
                    "shift",
                    default=0.0,
                    min=0.0,
                    max=20.0,
                    step=0.1,
                    tooltip="Above 1 favours high noise: composition over detail. 0 takes the family's "
                    "value.",
                ),
            ],
            outputs=[Objective.Output("objective_settings")],
        )

    @classmethod
    def execute(cls, sigmas: str, shift: float) -> io.NodeOutput:
        return io.NodeOutput(ObjectiveConfig(sigmas=sigmas, shift=shift))


class MemorySettings(io.ComfyNode):
    """Precision, and what is kept or recomputed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftMemorySettings",
            display_name="Memory Settings",
            description="Number format of the forward pass, and gradient checkpointing.",
            search_aliases=["graft", "vram", "bf16", "checkpointing"],
            inputs=[
                io.Combo.Input(
                    "precision",
                    options=["auto", "bf16", "fp16", "fp32"],
                    default="auto",
                    tooltip="Number format of the forward pass. The LoRA's own weights are always kept in "
                    "fp32.",
                ),
                io.Combo.Input(
                    "checkpointing",
                    options=["auto", "none", "block"],
                    default="auto",
                    tooltip="block recomputes each block in the backward pass: a third more time, far less "
                    "memory. "
                    "auto does so on a GPU.",
                ),
            ],
            outputs=[Memory.Output("memory_settings")],
        )

    @classmethod
    def execute(cls, precision: str, checkpointing: str) -> io.NodeOutput:
        return io.NodeOutput(MemoryConfig(dtype=precision, checkpointing=checkpointing))  # type: ignore[arg-type]
