"""Build LoRA: the layers to train, their algorithm and rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from comfy_api.latest import io

from ..training.adapters.build import ADAPTERS
from ..training.comfy.files.initial_lora import store_lora_model, summary
from ..training.comfy.files.lora_files import NONE, changed_at
from ..training.comfy.model.denoiser import ComfyDenoiser
from ..training.comfy.paths import lora_file_names, lora_file_path
from ..training.config import AdapterConfig
from ..training.family import target_presets
from ..training.user_error import UserError
from .node import Files, Node
from .sockets import Lora, schema
from .widgets import advanced, read, widget

SIZES: dict[str, Literal["file", "settings"]] = {"as in the file": "file", "as set here": "settings"}
"""Choice -> AdapterConfig.start_size."""


class BuildLora(Node):
    """Choose method, size and layers. Connect the model to see how many layers and parameters are trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftBuildLora",
            display_name="Build LoRA",
            description="Choose what to train: the method, its size, and the layers of the model.",
            search_aliases=["graft", "train", "lora", "rank"],
            inputs=[
                widget(AdapterConfig, "algorithm", list(ADAPTERS)),
                widget(AdapterConfig, "rank"),
                widget(AdapterConfig, "alpha"),
                widget(AdapterConfig, "targets", target_presets()),
                widget(AdapterConfig, "include"),
                widget(AdapterConfig, "exclude"),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="Base model; connect it to check the choice before training.",
                ),
                widget(AdapterConfig, "text_encoder"),
                Files(
                    "start_from",
                    options=[NONE, *lora_file_names()],
                    default=NONE,
                    optional=True,
                    tooltip="LoRA file to continue training, from any software. All its layers are trained, "
                    "also those that targets, include, exclude and blocks leave out. Layers that do not "
                    "fit the model are listed here and on Train Steps.",
                ),
                advanced(
                    io.Combo.Input(
                        "start_size",
                        options=list(SIZES),
                        default=next(iter(SIZES)),
                        optional=True,
                        tooltip="Algorithm, rank and alpha of the file to start from: its own, or those set "
                        "here; a larger rank starts with zeros.",
                    )
                ),
                io.LoraModel.Input(
                    "lora_model",
                    optional=True,
                    tooltip="LoRA of the graph to continue training, such as Train LoRA gives out, in place "
                    "of a file.",
                ),
            ],
            outputs=[Lora.Output("lora")],
        )

    @classmethod
    def fingerprint_inputs(cls, start_from: str = NONE, **_: Any) -> str:
        return "" if start_from == NONE else changed_at(lora_file_path(start_from))

    @classmethod
    def execute(
        cls,
        model: Any = None,
        start_from: str = NONE,
        start_size: str = next(iter(SIZES)),
        lora_model: Any = None,
        **values: Any,
    ) -> io.NodeOutput:
        file = "" if start_from == NONE else start_from
        if file and lora_model is not None:
            raise UserError(f"start_from: {file}, but a LORA_MODEL is connected too; choose one of the two.")
        config = replace(
            read(AdapterConfig(), values),
            start_from=file if lora_model is None else store_lora_model(lora_model),
            start_size=SIZES[start_size],
        )
        return io.NodeOutput(config, ui={"text": [_describe(model, config)]} if model is not None else None)


def _describe(model: Any, config: AdapterConfig) -> str:
    text = "\nand the text encoders" if config.text_encoder else ""
    return summary(ComfyDenoiser(model), config) + text
