"""Checkpoint Settings: how often a run saves itself. Tooltips are in training/config.py."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.config import CheckpointConfig
from .node import Node
from .sockets import Checkpoints, Saving, schema
from .widgets import in_order, read, widgets

ORDER = ("minutes", "steps", "keep", "tensorboard", "lora", "sqlite")


class CheckpointSettings(Node):
    """How often a run saves itself."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        tensorboard = io.Boolean.Input(
            "tensorboard",
            default=Saving.tensorboard,
            tooltip="Write a TensorBoard log to the run's folder.",
        )
        return schema(
            node_id="GraftCheckpointSettings",
            display_name="Checkpoint Settings",
            description="How often a run saves itself, and how many checkpoints it keeps.",
            search_aliases=["graft", "save every", "tensorboard"],
            inputs=in_order([*widgets(CheckpointConfig), tensorboard], ORDER),
            outputs=[Checkpoints.Output("checkpoint_settings")],
        )

    @classmethod
    def execute(cls, tensorboard: bool = Saving.tensorboard, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(Saving(read(CheckpointConfig(), values), tensorboard))
