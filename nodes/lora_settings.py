"""LoRA Settings: what Build LoRA leaves at its default. Tooltips are in training/config.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from ..training.adapters.preset import apply_preset
from ..training.config import AdapterConfig
from .node import Node
from .sockets import Lora, schema
from .widgets import in_order, read, widgets

BY_LAYER = {"lrs": "learning_rates", "ranks": "ranks", "alphas": "alphas", "algorithms": "algorithms"}
"""Fields with a value for each pattern of layers -> their widgets."""
ORDER = (
    "dropout", "rank_dropout", "module_dropout", "max_norm", "lora_plus_ratio", "rslora", "init", "tucker",
    "factor", "decompose_both", "full_matrix", "blocks", *BY_LAYER.values(), "preset",
)  # fmt: skip


class LoraSettings(Node):
    """Dropout, initial weights, and what differs from layer to layer."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        preset = io.String.Input(
            "preset",
            default="",
            multiline=True,
            optional=True,
            tooltip="Preset in LyCORIS's JSON layout: layers to train, instead of Build LoRA's targets, and "
            "the algorithm and rank of each. The patterns above take precedence.",
        )
        return schema(
            node_id="GraftLoraSettings",
            display_name="LoRA Settings",
            description="Dropout, initial weights, LoKr's shape, and ranks and learning rates by layer.",
            search_aliases=["graft", "dropout", "rslora", "pissa", "lora+", "per-layer", "block"],
            inputs=[
                Lora.Input("lora", tooltip="From Build LoRA."),
                *in_order([*widgets(AdapterConfig), preset], ORDER),
            ],
            outputs=[Lora.Output("lora_changed", display_name="lora")],
        )

    @classmethod
    def execute(cls, lora: AdapterConfig, preset: str = "", **values: Any) -> io.NodeOutput:
        here = read(AdapterConfig(), {name: values.pop(name, "") for name in BY_LAYER.values()})
        lora = read(lora, values)
        lora = apply_preset(preset, lora) if preset.strip() else lora
        rows: dict[str, Any] = {name: (*getattr(here, name), *getattr(lora, name)) for name in BY_LAYER}
        return io.NodeOutput(replace(lora, **rows))
