"""Save LoRA, Save Training State, Load Training State."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..training.comfy import paths
from ..training.comfy.run.graph_run import QueuedNode
from ..training.family import family_named
from ..training.files.lora.diffusers import FILE_FORMATS, comfy_reads
from ..training.files.lora.metadata import WEIGHTS, lora_metadata
from ..training.files.lora.write import write_lora
from ..training.files.tensor_file import TensorFile
from ..training.files.whole_file import WINDOWS
from ..training.memory.precision import DTYPES
from ..training.run.checkpoints import Checkpoints
from ..training.run.folder import Run
from ..training.run.run_log import read_log
from ..training.run.saved_state import StateHandle, open_state, save_state
from ..training.user_error import UserError
from .node import Node
from .sockets import State, schema


class SaveLora(Node):
    """A LoRA file where ComfyUI's Load LoRA finds it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftSaveLora",
            display_name="Save LoRA",
            description="Save the LoRA as .safetensors in output/loras, where Load LoRA lists it. Files that "
            "only diffusers reads go to output/diffusers.",
            search_aliases=["graft", "export", "safetensors"],
            is_output_node=True,
            inputs=[
                State.Input("state", tooltip="From Train Steps or Load Training State."),
                io.String.Input(
                    "name",
                    default="my_lora",
                    tooltip="File name under output/loras; '/' makes subfolders, {step} is the step reached.",
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
                    tooltip="Save this workflow in the file, so that it can be opened again.",
                ),
                io.Combo.Input(
                    "format",
                    options=list(FILE_FORMATS),
                    default=next(iter(FILE_FORMATS)),
                    optional=True,
                    tooltip="Layer names in the file. ComfyUI's names load in ComfyUI and, not tested, in "
                    "Forge and sd-scripts; for SDXL, Qwen-Image, HiDream and Z-Image in diffusers too, and "
                    "for Flux, Flux.2 and Chroma if trained with targets attn or attn-mlp. ComfyUI cannot "
                    "read all diffusers names of SD1.5, SD2, SDXL, Lumina 2, Flux.2 and Chroma: those files "
                    "go to output/diffusers, where Load LoRA does not list them.",
                ),
                io.String.Input(
                    "trigger",
                    default="",
                    optional=True,
                    tooltip="Trigger word to save in the file. Empty: the dataset's.",
                ),
                io.Image.Input(
                    "cover",
                    optional=True,
                    tooltip="Cover image to save in the file, which model browsers show.",
                ),
                io.Combo.Input(
                    "weights",
                    options=["average", "last step"],
                    default="average",
                    optional=True,
                    tooltip="Weights to save: the moving average of a run that has one, or the last step's. "
                    "Other runs have the last step's only.",
                ),
            ],
            outputs=[io.String.Output("path")],
            hidden=[io.Hidden.extra_pnginfo, io.Hidden.prompt],
        )

    @classmethod
    def execute(
        cls,
        state: StateHandle,
        name: str,
        dtype: str,
        save_workflow: bool,
        format: str = next(iter(FILE_FORMATS)),
        trigger: str = "",
        cover: Any = None,
        weights: str = "average",
    ) -> io.NodeOutput:
        trained = state.load()
        trained = replace(trained, weights=trained.result(average=weights == "average"))
        family = family_named(trained.family)
        path_of = paths.lora_path if comfy_reads(format, family) else paths.diffusers_path
        path = path_of(name.replace("{step}", str(trained.step)))
        tensors = FILE_FORMATS[format](trained, family, DTYPES[dtype])
        metadata = lora_metadata(
            trained,
            family,
            title=path.stem,
            trigger=trigger,
            cover=cover[0] if cover is not None else None,
            graph=_graph(QueuedNode.of(cls.hidden)) if save_workflow else {},
            finished=(state.path / "state.json").stat().st_mtime,
            seconds=_seconds(state),
        )
        before = _weights_in(path)
        try:
            metadata = write_lora(path, tensors, metadata)
        except OSError as error:
            remedy = "Choose another name, or free some space there"
            if WINDOWS and path.is_file() and isinstance(error.__cause__ or error, PermissionError):
                remedy = (
                    "Windows does not replace a file that is open, and a Load LoRA node may still have this "
                    "one open: choose another name, or restart ComfyUI"
                )
            raise UserError(
                f"{path}: the LoRA could not be saved ({error.strerror or error}). {remedy}, and queue the "
                "graph again: no training is lost."
            ) from error
        text = f"{path.name}: step {trained.step}, {path.stat().st_size / 1e6:.1f} MB"
        if not comfy_reads(format, family):
            text += f"; in {path.parent}, because ComfyUI's Load LoRA does not read these names"
        if before not in (None, metadata[WEIGHTS]):
            text += (
                "; it replaced another LoRA of this name. A Load LoRA that has read the old one keeps it "
                "until you choose another file there; a name with {step} keeps both files."
            )
        return io.NodeOutput(str(path), ui={"text": [text]})


def _weights_in(path: Path) -> str | None:
    """Return the digest of a LoRA file's weights, "" if it has none, None if there is no file."""
    try:
        return TensorFile(path).metadata.get(WEIGHTS, "")
    except ValueError:
        return "" if path.exists() else None


def _graph(node: QueuedNode) -> dict[str, Any]:
    """Return where the graph came from: the editor's workflow or a job file, else the graph itself."""
    sources = {name: node.extra[name] for name in ("workflow", "graft_job") if node.extra.get(name)}
    return sources or ({"prompt": node.prompt} if node.prompt else {})


def _seconds(state: StateHandle) -> float:
    """Return the seconds that a state's run took to reach it; 0 without its log."""
    steps = read_log(state.path.parent.parent / "log.jsonl")
    return sum(entry.get("seconds") or 0.0 for entry in steps if entry["step"] <= state.step)


class SaveTrainingState(Node):
    """A training state under a name of your own."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftSaveTrainingState",
            display_name="Save Training State",
            description="Save everything needed to continue training later, in output/graft/states.",
            search_aliases=["graft", "checkpoint", "resume"],
            is_output_node=True,
            inputs=[
                State.Input("state", tooltip="From Train Steps or Load Training State."),
                io.String.Input("name", default="my_lora", tooltip="Folder name under output/graft/states."),
            ],
            outputs=[io.String.Output("path")],
        )

    @classmethod
    def execute(cls, state: StateHandle, name: str) -> io.NodeOutput:
        folder = paths.state_folder(name)
        save_state(state.load(), folder)
        return io.NodeOutput(str(folder), ui={"text": [f"{folder.name}: step {state.step}"]})


class LoadTrainingState(Node):
    """A saved training state, to continue from."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftLoadTrainingState",
            display_name="Load Training State",
            description="Load a state from Save Training State, or the newest checkpoint of a run, to "
            "continue training on the same base model.",
            search_aliases=["graft", "resume"],
            inputs=[
                io.String.Input(
                    "name",
                    default="my_lora",
                    tooltip="Folder under output/graft/states, or the folder of a run under output/graft, "
                    "such as my_lora-0123456789abcdef.",
                )
            ],
            outputs=[State.Output("state")],
        )

    @classmethod
    def fingerprint_inputs(cls, name: str) -> str:
        return _saved(name).digest

    @classmethod
    def execute(cls, name: str) -> io.NodeOutput:
        return io.NodeOutput(_saved(name))


def _saved(name: str) -> StateHandle:
    """Return the state saved under a name, else the newest valid one of the run with that folder name."""
    folder = paths.state_folder(name)
    if (folder / "state.json").exists():
        return open_state(folder)
    state = Checkpoints(Run(paths.existing_run(name))).latest()
    if state is None:
        raise UserError(
            f"Load Training State: {name!r} is neither a state in {folder.parent} nor a run with a "
            f"checkpoint in {folder.parent.parent}; look up the folder's name there."
        )
    return state
