"""Validation Settings: early stopping on held-out images. Tooltips are in training/config.py."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.config import ValidationConfig
from .node import Node
from .sockets import Dataset, HeldOut, Validation, require_encoded, schema
from .widgets import read, widget, widgets

EVERY = 50
"""Steps; the config's default measures nothing."""


class ValidationSettings(Node):
    """Measure held-out images during a run, and stop when it has learned enough."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        rest = [entry for entry in widgets(ValidationConfig) if entry.id != "every"]
        return schema(
            node_id="GraftValidationSettings",
            display_name="Validation Settings",
            description="Measure the loss on held-out images, keep the best state, stop early.",
            search_aliases=["graft", "early stop", "held-out", "best"],
            inputs=[
                Dataset.Input("validation", tooltip="Encoded held-out images, from Split Dataset."),
                widget(ValidationConfig, "every", default=EVERY, min=1),
                *rest,
            ],
            outputs=[Validation.Output("validation_settings")],
        )

    @classmethod
    def execute(cls, validation: Any, every: int = EVERY, **values: Any) -> io.NodeOutput:
        config = read(ValidationConfig(), {**values, "every": every})
        return io.NodeOutput(HeldOut(config, require_encoded(validation, "validation")))
