"""Save LoRA, Save Training State, Load Training State."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..training.checkpoint import StateHandle, open_state, save_state
from ..training.comfy import paths
from ..training.family import family_named
from ..training.lora_file import lora_metadata, lora_tensors, write_lora
from ..training.memory.precision import DTYPES
from .sockets import State, schema


class SaveLora(io.ComfyNode):
    """Write the LoRA where the stock Load LoRA node finds it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftSaveLora",
            display_name="Save LoRA",
            description="Save the LoRA as .safetensors in output/loras, where Load LoRA lists it.",
            search_aliases=["graft", "export", "safetensors"],
            is_output_node=True,
            inputs=[
                State.Input("state"),
                io.String.Input(
                    "name", default="my_lora", tooltip="File name under output/loras; '/' makes subfolders."
                ),
                io.Combo.Input(
                    "dtype",
                    options=["fp16", "bf16", "fp32"],
                    default="bf16",
                    tooltip="Number format of the file: fp32 is exact and twice as large.",
                ),
                io.Boolean.Input(
                    "save_workflow",
                    default=True,
                    tooltip="Put this workflow into the file, so that it can be opened again.",
                ),
            ],
            outputs=[io.String.Output("path")],
            hidden=[io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(cls, state: StateHandle, name: str, dtype: str, save_workflow: bool) -> io.NodeOutput:
        trained, path = state.load(), paths.lora_path(name)
        family = family_named(trained.family)
        workflow = (cls.hidden.extra_pnginfo or {}).get("workflow") if save_workflow else None
        metadata = lora_metadata(trained, family, title=Path(name).name, **_notes(trained.notes, workflow))
        write_lora(path, lora_tensors(trained, family, DTYPES[dtype]), metadata)
        return io.NodeOutput(
            str(path), ui={"text": [f"{path.name}: step {trained.step}, {path.stat().st_size / 1e6:.1f} MB"]}
        )


class SaveTrainingState(io.ComfyNode):
    """Keep a training state under a name of your own."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftSaveTrainingState",
            display_name="Save Training State",
            description="Keep everything needed to go on training later, in output/graft/states.",
            search_aliases=["graft", "checkpoint", "resume"],
            is_output_node=True,
            inputs=[
                State.Input("state"),
                io.String.Input("name", default="my_lora", tooltip="Folder under output/graft/states."),
            ],
            outputs=[io.String.Output("path")],
        )

    @classmethod
    def execute(cls, state: StateHandle, name: str) -> io.NodeOutput:
        folder = paths.state_folder(name)
        save_state(state.load(), folder)
        return io.NodeOutput(str(folder), ui={"text": [f"{folder.name}: step {state.step}"]})


class LoadTrainingState(io.ComfyNode):
    """Go on from a saved training state."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftLoadTrainingState",
            display_name="Load Training State",
            description="Load what Save Training State kept, to go on training on the same base model.",
            search_aliases=["graft", "resume"],
            inputs=[io.String.Input("name", default="my_lora", tooltip="Folder under output/graft/states.")],
            outputs=[State.Output("state")],
        )

    @classmethod
    def fingerprint_inputs(cls, name: str) -> str:
        return (paths.state_folder(name) / "state.json").read_text(encoding="utf-8")

    @classmethod
    def execute(cls, name: str) -> io.NodeOutput:
        return io.NodeOutput(open_state(paths.state_folder(name)))


def _notes(notes: Any, workflow: Any) -> dict[str, str]:
    return {**notes, **({"workflow": json.dumps(workflow)} if workflow else {})}
