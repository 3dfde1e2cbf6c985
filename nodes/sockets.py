"""The types of Graft's inputs and outputs, and a schema shim for ComfyUI's versions."""

from __future__ import annotations

import dataclasses
from typing import Any

from comfy_api.latest import io

from ..training.config import (
    AdapterConfig,
    CheckpointConfig,
    EmaConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    ValidationConfig,
)
from ..training.user_error import UserError

Dataset = io.Custom("GRAFT_DATASET")
"""Before Encode Dataset: files and captions (ImageSet). After it: latents, conditioning (EncodedDataset)."""
Lora = io.Custom("GRAFT_LORA")
"""AdapterConfig: what will be trained."""
State = io.Custom("GRAFT_STATE")
"""StateHandle: a handle to a training state on disk."""
DatasetSettings = io.Custom("GRAFT_DATASET_SETTINGS")
"""DatasetConfig: captions, buckets, crops and masks beyond what Load Dataset shows."""
Optimizer = io.Custom("GRAFT_OPTIMIZER")
"""OptimizerSettings."""
Objective = io.Custom("GRAFT_OBJECTIVE")
Memory = io.Custom("GRAFT_MEMORY")

Validation = io.Custom("GRAFT_VALIDATION")
Checkpoints = io.Custom("GRAFT_CHECKPOINTS")
Samples = io.Custom("GRAFT_SAMPLES")
"""SamplePrompts: what to draw while training."""


def require_encoded(dataset: Any, name: str = "dataset") -> Any:
    """Return input `name`, an encoded dataset, as it is. Raises UserError for one that is not encoded."""
    if not hasattr(dataset, "largest_batch"):
        raise UserError(f"{name}: these images are not encoded yet; put Encode Dataset in between.")
    return dataset


def trained_clip(adapter: AdapterConfig, clip: Any, dataset: Any) -> Any:
    """Return CLIP if the LoRA has a text encoder part, else None. Raises UserError if it is missing, or the
    dataset's texts are.
    """
    if adapter.text_encoder and clip is None:
        raise UserError(
            "clip: missing; the LoRA trains the text encoders. Connect the base's CLIP, or set "
            "text_encoder to 0 in Build LoRA."
        )
    if adapter.text_encoder and not dataset.is_captioned:
        raise UserError(
            "captions: missing; the LoRA trains the text encoders, which need the texts. Connect them to "
            "Dataset From Latents, or set text_encoder to 0 in Build LoRA."
        )
    return clip if adapter.text_encoder else None


def require_images(dataset: Any, name: str = "dataset") -> Any:
    """Return input `name`, a dataset of images, as it is. Raises UserError for an encoded one."""
    if hasattr(dataset, "largest_batch"):
        raise UserError(
            f"{name}: these images are encoded already; connect the dataset from before Encode Dataset."
        )
    return dataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What travels as GRAFT_OPTIMIZER: how the weights are updated."""

    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig = EmaConfig()
    gradient_accumulation: int = TrainConfig.gradient_accumulation


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What travels as GRAFT_VALIDATION: the held-out images, and when to measure them."""

    config: ValidationConfig
    samples: Any


@dataclasses.dataclass(frozen=True)
class Saving:
    """What travels as GRAFT_CHECKPOINTS."""

    config: CheckpointConfig = CheckpointConfig()
    tensorboard: bool = False


def start_input() -> Any:
    """Return the input "start": a LoRA or a training state."""
    return io.MultiType.Input(
        "start",
        types=[Lora, State],
        tooltip="A new LoRA from Build LoRA, or a training state to continue.",
    )


CATEGORY = "training/graft"

_FIELDS = {field.name for field in dataclasses.fields(io.Schema)}


def schema(**values: Any) -> io.Schema:
    """Return a Schema without the fields that this ComfyUI lacks (0.3.75 has no search aliases).

    Outputs are shown by their ids, as newer ComfyUI does; 0.3.75 would show their types.
    """
    values.setdefault("category", CATEGORY)
    for output in values.get("outputs", ()):
        output.display_name = output.display_name or output.id
    return io.Schema(**{name: value for name, value in values.items() if name in _FIELDS})
