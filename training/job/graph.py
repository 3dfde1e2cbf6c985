"""The graph of a job: Graft's nodes with their settings, wired from the base to the saved LoRA."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import (
    AdapterConfig,
    CheckpointConfig,
    EmaConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScheduleConfig,
    to_dict,
)
from ..data.config import BucketConfig
from ..files.lora.diffusers import FILE_FORMATS

Prompt = dict[str, dict[str, Any]]
"""A graph in ComfyUI's API format."""

FROM_CHECKPOINT = "from checkpoint"
MOST_DATASETS_JOINED = 4
"""Inputs of Join Datasets."""


def of_kind(prompt: Prompt, kind: str) -> list[str]:
    """Return the ids of all nodes of a class."""
    return [number for number, node in prompt.items() if node["class_type"] == kind]


def graph_of(
    inputs: Mapping[str, dict[str, Any]], datasets: Sequence[Mapping[str, dict[str, Any]]]
) -> Prompt:
    """Return the graph of a job: its nodes with their settings, wired from the base to the saved LoRA.

    A node of settings is there when a key of it is set.
    """
    build = _Builder()
    base = build.add("base", inputs)
    dataset = _add_datasets(build, datasets)
    encoded = build.add(
        "encode", inputs, dataset=[dataset, 0], model=[base, 0], clip=[base, 1], vae=[base, 2]
    )
    lora = build.add("lora", inputs, model=[base, 0])
    if "lora_settings" in inputs:
        lora = build.add("lora_settings", inputs, lora=[lora, 0])
    wires = {}
    for name, slot in SETTINGS_OF_TRAIN_STEPS.items():
        if name in inputs:
            links = {"clip": [base, 1], "vae": [base, 2]} if name == "sample" else {}
            wires[slot] = [build.add(name, inputs, **links), 0]
    model = build.add("assistant", inputs, model=[base, 0]) if "assistant" in inputs else base
    train = build.add(
        "train", inputs, model=[model, 0], dataset=[encoded, 0], start=[lora, 0], clip=[base, 1], **wires
    )
    build.add("save", inputs, state=[train, 2])
    return build.prompt


def _add_datasets(build: _Builder, datasets: Sequence[Mapping[str, dict[str, Any]]]) -> str:
    """Add all datasets as one; where there are regularisation images, every other picture is one of them."""
    sides: dict[bool, list[str]] = {}
    for entry in datasets:
        regularises = bool(entry.get("dataset_settings", {}).get("regularisation"))
        sides.setdefault(regularises, []).append(_add_dataset(build, entry))
    return _join(build, [_join(build, numbers) for numbers in sides.values()], shares="1, 1")


def _join(build: _Builder, loaded: list[str], **inputs: Any) -> str:
    """Add nodes that make one dataset of several; of one, none."""
    while len(loaded) > 1:
        first, rest = loaded[:MOST_DATASETS_JOINED], loaded[MOST_DATASETS_JOINED:]
        wires = {f"dataset_{i + 1}": [number, 0] for i, number in enumerate(first)}
        loaded = [build.add("join", {}, **wires, **inputs), *rest]
    return loaded[0]


def _add_dataset(build: _Builder, entry: Mapping[str, dict[str, Any]]) -> str:
    if "dataset_settings" not in entry:
        return build.add("dataset", entry)
    return build.add("dataset", entry, dataset_settings=[build.add("dataset_settings", entry), 0])


@dataclass(frozen=True)
class Node:
    """A node of the graph: its class, its title and its inputs that are no wires, with their defaults."""

    kind: str
    title: str
    inputs: Mapping[str, Any] = field(default_factory=dict)


class _Builder:
    """Numbers nodes as they are added."""

    def __init__(self) -> None:
        self.prompt: Prompt = {}

    def add(self, name: str, inputs: Mapping[str, Mapping[str, Any]], **wires: list[Any]) -> str:
        node, key = NODES[name], str(len(self.prompt) + 1)
        self.prompt[key] = {
            "class_type": node.kind,
            "_meta": {"title": node.title},
            "inputs": copy.deepcopy({**node.inputs, **inputs.get(name, {}), **wires}),
        }
        return key


_checkpoints, _memory, _sizes = CheckpointConfig(), MemoryConfig(), BucketConfig()
_optimizer, _schedule, _adapter = OptimizerConfig(), ScheduleConfig(), AdapterConfig()

NODES: Mapping[str, Node] = {
    "base": Node(
        "GraftLoadBaseModel",
        "Load Base Model",
        {
            "model": "",
            "text_encoder_1": FROM_CHECKPOINT,
            "text_encoder_2": FROM_CHECKPOINT,
            "text_encoder_3": FROM_CHECKPOINT,
            "vae": FROM_CHECKPOINT,
            "dtype": "auto",
        },
    ),
    "assistant": Node("LoraLoaderModelOnly", "Load LoRA", {"lora_name": "", "strength_model": 1.0}),
    "dataset_settings": Node(
        "GraftDatasetSettings",
        "Dataset Settings",
        {
            "captions_from": "auto", "prefix": "", "suffix": "", "shuffle_tags": False, "keep_tags": 0,
            "tag_dropout": 0.0, "remove_tags": "", "crop": "center", "square": False,
            "upscale": _sizes.upscale, "min_side": 0, "max_side": 0, "brightness": 0.0, "contrast": 0.0,
            "saturation": 0.0, "hue": 0.0, "masks": "file", "outside_mask": 0.0, "weight": 1.0,
            "regularisation": False, "background": "#ffffff",
        },
    ),
    "dataset": Node(
        "GraftLoadDataset",
        "Load Dataset",
        {
            "folder": "", "resolution": "1024", "trigger": "", "missing_captions": "error", "repeats": 1,
            "caption_dropout": 0.0, "flip": False, "recursive": False, "skip_bad_images": False,
        },
    ),
    "join": Node("GraftJoinDatasets", "Join Datasets"),
    "encode": Node("GraftEncodeDataset", "Encode Dataset", {"encode_again": False}),
    "lora_settings": Node(
        "GraftLoraSettings",
        "LoRA Settings",
        {
            name: getattr(_adapter, name)
            for name in (
                "dropout", "rank_dropout", "module_dropout", "max_norm", "lora_plus_ratio", "rslora", "init",
                "tucker", "factor", "decompose_both", "full_matrix", "blocks",
            )
        } | dict.fromkeys(("learning_rates", "ranks", "alphas", "algorithms"), ""),
    ),
    "lora": Node(
        "GraftBuildLora",
        "Build LoRA",
        {
            "algorithm": _adapter.algorithm, "rank": _adapter.rank, "alpha": _adapter.alpha,
            "targets": _adapter.targets, "include": "", "exclude": "",
        },
    ),
    "optimizer": Node(
        "GraftOptimizerSettings",
        "Optimizer Settings",
        {
            "optimizer": _optimizer.name, "schedule": _schedule.name, "warmup_steps": _schedule.warmup_steps,
            "weight_decay": _optimizer.weight_decay, "max_grad_norm": _optimizer.max_grad_norm,
            "gradient_accumulation": 1, "floor": _schedule.floor, "cycles": _schedule.cycles,
            "power": _schedule.power, "ema_decay": 0.0, "weights": _optimizer.weights,
            "d_coef": _optimizer.d_coef, "beta1": _optimizer.betas[0], "beta2": _optimizer.betas[1],
            "eps": _optimizer.eps, "ema_power": EmaConfig.power,
        },
    ),
    "objective": Node("GraftObjectiveSettings", "Objective Settings", to_dict(ObjectiveConfig())),
    "memory": Node(
        "GraftMemorySettings",
        "Memory Settings",
        {
            "precision": _memory.dtype, "checkpointing": _memory.checkpointing, "base": _memory.base,
            "budget_gb": _memory.budget_gb, "compile": _memory.compile,
        },
    ),
    "checkpoints": Node(
        "GraftCheckpointSettings",
        "Checkpoint Settings",
        {
            "minutes": _checkpoints.minutes, "steps": _checkpoints.steps, "keep": _checkpoints.keep,
            "tensorboard": False,
            "lora": _checkpoints.lora, "sqlite": _checkpoints.sqlite,
        },
    ),
    "sample": Node(
        "GraftSamplePrompts",
        "Sample Prompts",
        {
            "prompts": "", "negative": "", "every": 100, "before_training": True, "width": 1024,
            "height": 1024, "steps": 20, "cfg": 0.0, "sampler": "euler", "scheduler": "simple", "seed": 0,
            "walk_seed": False, "guidance": -1.0,
        },
    ),
    "train": Node(
        "GraftTrainSteps",
        "Train Steps",
        {
            "steps": 1000, "total_steps": 0, "learning_rate": 1e-4, "batch_size": 1, "seed": 0,
            "name": "my_lora",
        },
    ),
    "save": Node(
        "GraftSaveLora",
        "Save LoRA",
        {
            "name": "my_lora", "dtype": "bf16", "save_workflow": True, "format": next(iter(FILE_FORMATS)),
        },
    ),
}  # fmt: skip
"""The nodes of a graph; the names are those that KEYS and DATASET_KEYS use."""

SETTINGS_OF_TRAIN_STEPS = {
    "optimizer": "optimizer_settings",
    "objective": "objective_settings",
    "memory": "memory_settings",
    "checkpoints": "checkpoint_settings",
    "sample": "sample_prompts",
}
"""Node -> input of Train Steps."""
