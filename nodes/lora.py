"""Build LoRA: what is trained."""

from __future__ import annotations

from typing import Any, Literal

from comfy_api.latest import io

from ..training.adapters.build import ADAPTERS
from ..training.comfy.files.initial_lora import summary
from ..training.comfy.files.lora_files import NONE, changed_at
from ..training.comfy.files.paths import lora_file_names, lora_file_path
from ..training.comfy.model.denoiser import ComfyDenoiser
from ..training.config import AdapterConfig
from ..training.family import target_presets
from ..training.user_error import UserError
from .node import Files, Node
from .sockets import Lora, schema
from .widgets import advanced, lines

SIZES: dict[str, Literal["file", "settings"]] = {"as in the file": "file", "as set here": "settings"}
"""What people choose -> AdapterConfig.start_size."""


class BuildLora(Node):
    """Choose method, size and layers. Connect the model to see how many layers and parameters that gives."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftBuildLora",
            display_name="Build LoRA",
            description="Choose what is trained: the method, its size, and which layers of the model.",
            search_aliases=["graft", "train", "lora", "rank"],
            inputs=[
                io.Combo.Input(
                    "algorithm",
                    options=list(ADAPTERS),
                    default="lora",
                    tooltip="LoRA is the usual choice and loads everywhere.",
                ),
                io.Int.Input(
                    "rank",
                    default=16,
                    min=1,
                    max=1024,
                    tooltip="Size of the LoRA: 8 to 16 a face, 32 and more a style.",
                ),
                io.Float.Input(
                    "alpha",
                    default=0.0,
                    min=0.0,
                    max=4096.0,
                    step=0.5,
                    tooltip="Strength is alpha / rank. 0 means alpha = rank, so strength 1; "
                    "1 for LoHa, 4 for rsLoRA.",
                ),
                io.Combo.Input(
                    "targets",
                    options=target_presets(),
                    default="attn-mlp",
                    tooltip="Which layers: attention and MLP of every block (default), attention only, "
                    "every linear layer, convolutions too (all), or embeddings as well (everything).",
                ),
                advanced(
                    io.String.Input(
                        "include",
                        default="",
                        multiline=True,
                        optional=True,
                        tooltip="Patterns of layer names, one a line: only these are trained, e.g. "
                        "joint_blocks.1?.*",
                    )
                ),
                io.String.Input(
                    "exclude",
                    default="",
                    multiline=True,
                    optional=True,
                    tooltip="Patterns of layer names, one a line, that are left out.",
                ),
                io.Model.Input(
                    "model", optional=True, tooltip="Connect it to check the choice before training."
                ),
                io.Float.Input(
                    "text_encoder",
                    default=0.0,
                    min=0.0,
                    max=10.0,
                    step=0.05,
                    optional=True,
                    tooltip="Train the CLIP text encoders too, at this multiple of the learning rate: 0.1 to "
                    "0.5 is usual, 0 leaves them. Train Steps then needs CLIP, and encodes captions in every "
                    "step.",
                ),
                Files(
                    "start_from",
                    options=[NONE, *lora_file_names()],
                    default=NONE,
                    optional=True,
                    tooltip="A LoRA file to go on training, of any software. All its layers are trained, "
                    "also those that targets, include, exclude and blocks leave out. What of it fits no "
                    "layer of the model is listed here and on Train Steps.",
                ),
                advanced(
                    io.Combo.Input(
                        "start_size",
                        options=list(SIZES),
                        default=next(iter(SIZES)),
                        optional=True,
                        tooltip="Of the file to start from: its own algorithm, rank and alpha, or those set "
                        "here; what a larger rank adds begins at nothing.",
                    )
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
        algorithm: str,
        rank: int,
        alpha: float,
        targets: str,
        include: str = "",
        exclude: str = "",
        model: Any = None,
        text_encoder: float = 0.0,
        start_from: str = NONE,
        start_size: str = next(iter(SIZES)),
    ) -> io.NodeOutput:
        config = AdapterConfig(
            algorithm=algorithm,
            rank=rank,
            alpha=alpha,
            targets=targets,
            include=lines(include),
            exclude=lines(exclude),
            text_encoder=text_encoder,
            start_from="" if start_from == NONE else start_from,
            start_size=SIZES[start_size],
        )
        if algorithm not in ADAPTERS:
            raise UserError(f"algorithm: {algorithm!r} is unknown; choose one of {', '.join(ADAPTERS)}.")
        return io.NodeOutput(config, ui={"text": [_describe(model, config)]} if model is not None else None)


def _describe(model: Any, config: AdapterConfig) -> str:
    text = "\nand the text encoders" if config.text_encoder else ""
    return summary(ComfyDenoiser(model), config) + text
