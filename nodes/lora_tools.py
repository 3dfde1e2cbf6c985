"""Merge, Unmerge, Extract, Resize, Convert and Inspect LoRA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..training.comfy import paths
from ..training.comfy.files import lora_files
from ..training.comfy.files.lora_files import AS_IT_IS, NONE
from ..training.comfy.model import loading
from ..training.tools.convert import LAYOUTS
from .node import Files, Node
from .sockets import schema

DTYPES = ("fp16", "bf16", "fp32")


def _lora(tooltip: str) -> Any:
    return Files("lora_name", options=paths.lora_file_names(), tooltip=tooltip)


def _model_file(name: str, tooltip: str, others: Sequence[str] = ()) -> Any:
    options = [*others, *loading.model_files()]
    return Files(name, options=options, default=others[0] if others else None, tooltip=tooltip)


def _strength(name: str, tooltip: str) -> Any:
    return io.Float.Input(name, default=1.0, min=-100.0, max=100.0, step=0.01, tooltip=tooltip)


def _size(rank: int) -> list[Any]:
    return [
        io.Int.Input(
            "rank",
            default=rank,
            min=0,
            max=4096,
            tooltip="Largest rank of a layer, which decides the size of the file. 0: by energy alone.",
        ),
        io.Float.Input(
            "energy",
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.01,
            round=False,
            tooltip="Share of each layer's squared singular values to keep, such as 0.95: layers that "
            "changed little get a smaller rank. 0: by rank alone.",
        ),
    ]


def _output(folder: str = "loras", default: str = "my_lora") -> Any:
    tooltip = f"File name under output/{folder}; '/' makes subfolders."
    return io.String.Input("name", default=default, tooltip=tooltip)


def _dtype(options: Sequence[str] = DTYPES) -> Any:
    tooltip = "Number format of the file: fp32 is exact and twice as large."
    return io.Combo.Input("dtype", options=list(options), default=options[0], tooltip=tooltip)


def _written(result: tuple[Path, str]) -> io.NodeOutput:
    path, report = result
    return io.NodeOutput(str(path), ui={"text": [report]})


class _ReadsFiles(Node):
    """A node whose inputs name files: it runs again when one of them is replaced under the same name."""

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> str:
        named = {slot: inputs[slot] for slot in FILES if inputs.get(slot, NONE) != NONE}
        return lora_files.changed_at(*(FILES[slot](name) for slot, name in named.items()))


FILES: Mapping[str, Callable[[str], Path]] = {
    "lora_name": paths.lora_file_path,
    **dict.fromkeys(("checkpoint", "original", "tuned", "base"), loading.model_path),
}
"""Input that names a file -> where that file is."""


class MergeLora(_ReadsFiles):
    """A MODEL with a LoRA merged in, which Unmerge LoRA can take out again."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftMergeLora",
            display_name="Merge LoRA",
            description="Merge a LoRA into MODEL and CLIP. Unlike Load LoRA, it lists keys that do not fit, "
            "refuses to merge twice, and can be undone with Unmerge LoRA. To save the result, use Save "
            "Checkpoint.",
            search_aliases=["graft", "apply lora", "fuse"],
            inputs=[
                io.Model.Input("model", tooltip="Model to merge into; it is not changed."),
                _lora("LoRA file from models/loras or output/loras."),
                _strength("strength_model", "Strength: 1 is as trained; below 0 inverts the LoRA."),
                _strength("strength_clip", "Strength of the text encoder part, if the LoRA has one."),
                io.Clip.Input("clip", optional=True, tooltip="CLIP, for LoRAs with a text encoder part."),
            ],
            outputs=[io.Model.Output("MODEL"), io.Clip.Output("CLIP"), io.String.Output("report")],
        )

    @classmethod
    def execute(
        cls, model: Any, lora_name: str, strength_model: float, strength_clip: float, clip: Any = None
    ) -> io.NodeOutput:
        merged = lora_files.merge_lora(model, clip, lora_name, strength_model, strength_clip)
        return io.NodeOutput(*merged, ui={"text": [merged[2]]})


class UnmergeLora(_ReadsFiles):
    """The MODEL from before Merge LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftUnmergeLora",
            display_name="Unmerge LoRA",
            description="Take a merged LoRA out of MODEL and CLIP: the weights are those from before Merge "
            "LoRA, bit for bit.",
            search_aliases=["graft", "remove lora"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="Model from Merge LoRA, or from a node after it; it is not changed."
                ),
                _lora("LoRA that was merged, under any name."),
                io.Clip.Input("clip", optional=True, tooltip="CLIP from Merge LoRA."),
            ],
            outputs=[io.Model.Output("MODEL"), io.Clip.Output("CLIP")],
        )

    @classmethod
    def execute(cls, model: Any, lora_name: str, clip: Any = None) -> io.NodeOutput:
        model, clip, report = lora_files.unmerge_lora(model, clip, lora_name)
        return io.NodeOutput(model, clip, ui={"text": [report]})


class MergeCheckpoint(_ReadsFiles):
    """A checkpoint file with a LoRA merged in."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftMergeCheckpoint",
            display_name="Merge LoRA Into Checkpoint",
            description="Write a copy of a checkpoint with a LoRA merged in, to output/checkpoints. The file "
            "is copied weight by weight, so it needs hardly any memory.",
            search_aliases=["graft", "bake", "fuse"],
            is_output_node=True,
            inputs=[
                _model_file("checkpoint", "Checkpoint to copy, with bf16, fp16 or fp32 weights."),
                _lora("LoRA to merge."),
                _strength("strength", "Strength: 1 is as trained."),
                _output("checkpoints", "merged"),
            ],
            outputs=[io.String.Output("path")],
        )

    @classmethod
    def execute(cls, checkpoint: str, lora_name: str, strength: float, name: str) -> io.NodeOutput:
        return _written(lora_files.merge_checkpoint(checkpoint, lora_name, strength, name))


class ExtractLora(_ReadsFiles):
    """The difference of two models as a LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftExtractLora",
            display_name="Extract LoRA",
            description="Save the difference between a fine-tuned model and its original as a LoRA in "
            "output/loras. Parts that a LoRA cannot hold (biases, norms, the VAE) are listed.",
            search_aliases=["graft", "svd", "difference"],
            is_output_node=True,
            inputs=[
                _model_file("original", "Original model, which the other was fine-tuned from."),
                _model_file("tuned", "Fine-tuned model, of the same architecture."),
                *_size(rank=32),
                _dtype(),
                _output(default="extracted"),
            ],
            outputs=[io.String.Output("path")],
        )

    @classmethod
    def execute(
        cls, original: str, tuned: str, rank: int, energy: float, dtype: str, name: str
    ) -> io.NodeOutput:
        return _written(lora_files.extract_lora(original, tuned, rank, energy, dtype, name))


class ResizeLora(_ReadsFiles):
    """A LoRA of lower rank."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftResizeLora",
            display_name="Resize LoRA",
            description="Make a LoRA smaller, in output/loras: each layer becomes its best approximation of "
            "lower rank. LoHa, LoKr and full differences become plain LoRA.",
            search_aliases=["graft", "rank", "compress", "svd"],
            is_output_node=True,
            inputs=[_lora("LoRA to resize."), *_size(rank=8), _dtype(), _output(default="resized")],
            outputs=[io.String.Output("path")],
        )

    @classmethod
    def execute(cls, lora_name: str, rank: int, energy: float, dtype: str, name: str) -> io.NodeOutput:
        return _written(lora_files.resize_lora(lora_name, rank, energy, dtype, name))


class ConvertLora(_ReadsFiles):
    """A LoRA in another layout or number format."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftConvertLora",
            display_name="Convert LoRA",
            description="Convert a LoRA to the layer names of other software, or to another number format, "
            "in output/loras; files that ComfyUI cannot read go to output/diffusers. The effect stays the "
            "same.",
            search_aliases=["graft", "kohya", "diffusers", "peft"],
            is_output_node=True,
            inputs=[
                _lora("LoRA to convert."),
                io.Combo.Input(
                    "layout",
                    options=list(LAYOUTS),
                    default=LAYOUTS[0],
                    tooltip="Layer names. kohya: for ComfyUI and, not tested, Forge and sd-scripts. "
                    "native: for ComfyUI and ai-toolkit; also for diffusers with Qwen-Image, HiDream and "
                    "Z-Image, and with the blocks of Flux.2. peft: for PEFT on the original model. "
                    "diffusers: for diffusers.",
                ),
                _dtype((AS_IT_IS, *DTYPES)),
                _model_file(
                    "base",
                    "Checkpoint of the LoRA's base. Needed if names alone do not identify a layer: from "
                    "kohya to another layout, and to or from diffusers.",
                    [NONE],
                ),
                _output(default="converted"),
            ],
            outputs=[io.String.Output("path")],
        )

    @classmethod
    def execute(cls, lora_name: str, layout: str, dtype: str, base: str, name: str) -> io.NodeOutput:
        return _written(lora_files.convert_lora(lora_name, layout, dtype, base, name))


class InspectLora(_ReadsFiles):
    """What is in a LoRA file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftInspectLora",
            display_name="Inspect LoRA",
            description="Show a LoRA's method, rank, strength, base model, change by block, and metadata.",
            search_aliases=["graft", "metadata", "norms", "rank"],
            is_output_node=True,
            inputs=[_lora("LoRA to inspect.")],
            outputs=[io.String.Output("report")],
        )

    @classmethod
    def execute(cls, lora_name: str) -> io.NodeOutput:
        report = lora_files.inspect_lora(lora_name)
        return io.NodeOutput(report, ui={"text": [report]})
