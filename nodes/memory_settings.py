"""Memory Settings: precision, checkpointing and the base. Tooltips are in training/config.py."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training.config import MemoryConfig
from ..training.memory.activation_checkpointing import MODES
from ..training.memory.weight_store import EVERY_STORE
from .node import Node
from .sockets import Memory, schema
from .widgets import read, widgets


class MemorySettings(Node):
    """Number format, checkpointing, and where the frozen weights are."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftMemorySettings",
            display_name="Memory Settings",
            description="Number format of the forward pass, activation checkpointing, and offloading or "
            "quantization of the base.",
            search_aliases=[
                *("graft", "vram", "bf16", "checkpointing", "offload", "block swap", "nf4", "fp8", "int8"),
            ],
            inputs=widgets(MemoryConfig, checkpointing=["auto", *MODES], base=["auto", *EVERY_STORE]),
            outputs=[Memory.Output("memory_settings")],
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(read(MemoryConfig(), values))
