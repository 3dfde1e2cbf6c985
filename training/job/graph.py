"""The graph of a job: Graft's nodes with their settings, from the base to the saved LoRA."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import (
    AdapterConfig,
    CheckpointConfig,
    EmaConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    SampleConfig,
    ScheduleConfig,
    TrainConfig,
    settings,
)
from ..data.config import DatasetConfig
from ..data.slider_words import SliderWords
from ..files.lora.diffusers import FILE_FORMATS

Prompt = dict[str, dict[str, Any]]
"""A graph in ComfyUI's API format."""

FROM_CHECKPOINT = "from checkpoint"
MOST_DATASETS_JOINED = 4
"""Inputs of Join Datasets."""


def of_kind(prompt: Prompt, kind: str) -> list[str]:
    """Return the ids of all nodes of a class."""
    return [node_id for node_id, node in prompt.items() if node["class_type"] == kind]


def graph_of(
    inputs: Mapping[str, dict[str, Any]], datasets: Sequence[Mapping[str, dict[str, Any]]]
) -> Prompt:
    """Return the graph of a job: its nodes with their settings, wired from the base to the saved LoRA.

    A node of settings is there if a key sets one of its inputs.
    """
    build = _Builder()
    base = build.add("base", inputs)
    dataset = _add_datasets(build, datasets)
    if "slider" in inputs:
        dataset = build.add("slider", inputs, dataset=[dataset, 0])
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
            if links and "assistant" in inputs:  # which is for training alone
                links["model"] = [base, 0]
            wires[slot] = [build.add(name, inputs, **links), 0]
    model = build.add("assistant", inputs, model=[base, 0]) if "assistant" in inputs else base
    train = build.add(
        "train", inputs, model=[model, 0], dataset=[encoded, 0], start=[lora, 0], clip=[base, 1], **wires
    )
    build.add("save", inputs, state=[train, 2])
    return build.prompt


def _add_datasets(build: _Builder, datasets: Sequence[Mapping[str, dict[str, Any]]]) -> str:
    """Add all datasets as one; with regularization images, every other image is one of them."""
    sides: dict[bool, list[str]] = {}
    for entry in datasets:
        regularises = bool(entry.get("dataset_settings", {}).get("regularisation"))
        sides.setdefault(regularises, []).append(_add_dataset(build, entry))
    return _join(build, [_join(build, node_ids) for node_ids in sides.values()], shares="1, 1")


def _join(build: _Builder, loaded: list[str], **inputs: Any) -> str:
    """Add nodes that join several datasets; none for a single one."""
    while len(loaded) > 1:
        first, rest = loaded[:MOST_DATASETS_JOINED], loaded[MOST_DATASETS_JOINED:]
        wires = {f"dataset_{i + 1}": [node_id, 0] for i, node_id in enumerate(first)}
        loaded = [build.add("join", {}, **wires, **inputs), *rest]
    return loaded[0]


def _add_dataset(build: _Builder, entry: Mapping[str, dict[str, Any]]) -> str:
    if "dataset_settings" not in entry:
        return build.add("dataset", entry)
    return build.add("dataset", entry, dataset_settings=[build.add("dataset_settings", entry), 0])


@dataclass(frozen=True)
class Node:
    """A node of the graph: its class, its title, and its inputs that are not wires, with their defaults."""

    kind: str
    title: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    newer: Collection[str] = ()
    """Inputs that a graph leaves out unless a key sets them, as older graphs do."""

    @property
    def written(self) -> dict[str, Any]:
        """Return the inputs that every graph has."""
        return {name: value for name, value in self.inputs.items() if name not in self.newer}


class _Builder:
    """A graph in the making; nodes are numbered as they are added."""

    def __init__(self) -> None:
        self.prompt: Prompt = {}

    def add(self, name: str, inputs: Mapping[str, Mapping[str, Any]], **wires: list[Any]) -> str:
        node, key = NODES[name], str(len(self.prompt) + 1)
        self.prompt[key] = {
            "class_type": node.kind,
            "_meta": {"title": node.title},
            "inputs": copy.deepcopy({**node.written, **inputs.get(name, {}), **wires}),
        }
        return key


def _node(
    kind: str, title: str, *configs: type, main: bool = False, newer: Collection[str] = (), **others: Any
) -> Node:
    """Return the node that shows the settings of `configs`, and `others`."""
    shown = [setting for config in configs for setting in settings(config, main=main)]
    inputs = {setting.input: "" if setting.default == () else setting.default for setting in shown}
    return Node(
        kind, title, others | inputs, {*newer, *(setting.input for setting in shown if setting.added)}
    )


NODES: Mapping[str, Node] = {
    "base": _node(
        "GraftLoadBaseModel",
        "Load Base Model",
        model="",
        text_encoder_1=FROM_CHECKPOINT,
        text_encoder_2=FROM_CHECKPOINT,
        text_encoder_3=FROM_CHECKPOINT,
        vae=FROM_CHECKPOINT,
        dtype="auto",
    ),
    "assistant": _node("LoraLoaderModelOnly", "Load LoRA", lora_name="", strength_model=1.0),
    "dataset_settings": _node("GraftDatasetSettings", "Dataset Settings", DatasetConfig),
    "dataset": _node(
        "GraftLoadDataset", "Load Dataset", DatasetConfig, main=True, folder="", resolution="1024"
    ),
    "join": _node("GraftJoinDatasets", "Join Datasets"),
    "slider": _node("GraftSliderFromWords", "Slider From Words", SliderWords),
    "encode": _node("GraftEncodeDataset", "Encode Dataset", encode_again=False),
    "lora_settings": _node("GraftLoraSettings", "LoRA Settings", AdapterConfig),
    "lora": _node("GraftBuildLora", "Build LoRA", AdapterConfig, main=True, newer=["text_encoder"]),
    "optimizer": _node(
        "GraftOptimizerSettings",
        "Optimizer Settings",
        OptimizerConfig,
        ScheduleConfig,
        EmaConfig,
        gradient_accumulation=TrainConfig.gradient_accumulation,
    ),
    "objective": _node("GraftObjectiveSettings", "Objective Settings", ObjectiveConfig),
    "memory": _node("GraftMemorySettings", "Memory Settings", MemoryConfig),
    "checkpoints": _node(
        "GraftCheckpointSettings", "Checkpoint Settings", CheckpointConfig, tensorboard=False
    ),
    "sample": _node("GraftSamplePrompts", "Sample Prompts", SampleConfig, prompts="", seed=0),
    "train": _node(
        "GraftTrainSteps",
        "Train Steps",
        OptimizerConfig,
        ScheduleConfig,
        main=True,
        batch_size=TrainConfig.batch_size,
        steps=1000,
        seed=0,
        name="my_lora",
    ),
    "save": _node(
        "GraftSaveLora",
        "Save LoRA",
        name="my_lora",
        dtype="bf16",
        save_workflow=True,
        format=next(iter(FILE_FORMATS)),
    ),
}
"""The nodes of a graph; the names are those that KEYS and DATASET_KEYS use."""

SETTINGS_OF_TRAIN_STEPS = {
    "optimizer": "optimizer_settings",
    "objective": "objective_settings",
    "memory": "memory_settings",
    "checkpoints": "checkpoint_settings",
    "sample": "sample_prompts",
}
"""Node -> input of Train Steps."""
