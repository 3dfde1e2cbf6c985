"""Training Job: the settings of a job file as outputs."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..training import data
from ..training.comfy.files import job_files as jobs
from ..training.job.graph import NODES
from ..training.job.read import Job
from .checkpoint_settings import CheckpointSettings
from .dataset import JoinDatasets, LoadDataset
from .dataset_settings import DatasetSettingsNode
from .lora import BuildLora
from .lora_settings import LoraSettings
from .memory_settings import MemorySettings
from .node import Files, Node
from .objective_settings import ObjectiveSettings
from .optimizer_settings import OptimizerSettingsNode
from .sample_prompts import SamplePromptsNode
from .sockets import Checkpoints, Dataset, Lora, Memory, Objective, Optimizer, Samples, schema


class TrainingJob(Node):
    """A job file as values for other nodes. The base model is loaded separately."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="GraftTrainingJob",
            display_name="Training Job",
            description="Read a job file in the layout of EriDiffusion and ai-toolkit. Connect its outputs "
            "to Encode Dataset and Train Steps.",
            search_aliases=["graft", "yaml", "config", "ai-toolkit", "eridiffusion"],
            inputs=[
                Files(
                    "file",
                    options=jobs.job_files(),
                    tooltip="Job file: a .yaml file in ComfyUI's input folder, or in one registered as "
                    "graft_datasets.",
                ),
                io.Clip.Input("clip", optional=True, tooltip="CLIP, to draw the file's sample prompts."),
                io.Vae.Input("vae", optional=True, tooltip="VAE, to draw the file's sample prompts."),
            ],
            outputs=[
                Dataset.Output("dataset", tooltip="For Encode Dataset."),
                Lora.Output("lora", tooltip="For Train Steps."),
                Optimizer.Output("optimizer_settings"),
                Objective.Output("objective_settings"),
                Memory.Output("memory_settings"),
                Checkpoints.Output("checkpoint_settings"),
                Samples.Output("sample_prompts", tooltip="Needs CLIP and VAE."),
                io.Int.Output("steps"),
                io.Float.Output("learning_rate"),
                io.Int.Output("batch_size"),
                io.Int.Output("seed"),
                io.String.Output("name"),
                io.String.Output("save_dtype", tooltip="For Save LoRA."),
            ],
        )

    @classmethod
    def validate_inputs(cls, file: str) -> bool:
        """Accept files that were made since the page was loaded."""
        return True

    @classmethod
    def fingerprint_inputs(cls, file: str, **others: Any) -> list[str]:
        job = jobs.load_job(file)
        sets = [LoadDataset.fingerprint_inputs(node["inputs"]["folder"]) for node in _datasets(job)]
        return [jobs.job_file(file).read_text(encoding="utf-8-sig"), *sets]

    @classmethod
    def execute(cls, file: str, clip: Any = None, vae: Any = None) -> io.NodeOutput:
        job = jobs.load_job(file)
        train = _inputs(job, "train")
        dataset = _dataset(job)
        lora = _value(BuildLora, job, "lora")
        if job.nodes("GraftLoraSettings"):
            lora = _value(LoraSettings, job, "lora_settings", lora=lora)
        draws = clip is not None and vae is not None and bool(job.nodes("GraftSamplePrompts"))
        text = [data.summary(dataset), *_on_no_wire(job)]
        if assistant := job.nodes(NODES["assistant"].kind):
            name = assistant[0]["inputs"]["lora_name"]
            text.append(f"assistant LoRA: {name}; apply it with Load LoRA to the MODEL for Train Steps")
        if job.nodes("GraftSamplePrompts") and not draws:
            text.append("connect CLIP and VAE to draw the samples")
        return io.NodeOutput(
            dataset,
            lora,
            _value(OptimizerSettingsNode, job, "optimizer"),
            _value(ObjectiveSettings, job, "objective"),
            _value(MemorySettings, job, "memory"),
            _value(CheckpointSettings, job, "checkpoints"),
            _value(SamplePromptsNode, job, "sample", clip=clip, vae=vae) if draws else None,
            *(train[name] for name in ("steps", "learning_rate", "batch_size", "seed", "name")),
            _inputs(job, "save")["dtype"],
            ui={"text": ["\n".join(text)]},
        )


def _on_no_wire(job: Job) -> list[str]:
    """Return a line for each node whose inputs the file sets, but which no output of this node reaches."""
    lines = []
    for name in ("base", "encode", "save"):
        node, inputs = NODES[name], _inputs(job, name)
        changed = [
            f"{key} {value}"
            for key, value in inputs.items()
            if value != node.inputs[key] and (name, key) not in (("save", "name"), ("save", "dtype"))
        ]
        if changed:
            lines.append(f"set in {node.title}: {', '.join(changed)}")
    return lines


OF_A_DATASET = {
    "GraftDatasetSettings": DatasetSettingsNode,
    "GraftJoinDatasets": JoinDatasets,
    "GraftLoadDataset": LoadDataset,
}


def _dataset(job: Job) -> Any:
    """Return the job's datasets as one, joined as in its graph."""
    return _made(job, job.nodes("GraftEncodeDataset")[0]["inputs"]["dataset"][0])


def _made(job: Job, node_id: str) -> Any:
    """Return the first output of a node of the job's graph, executed with the nodes it is wired to."""
    node = job.prompt[node_id]
    inputs = {
        name: _made(job, value[0]) if isinstance(value, list) else value
        for name, value in node["inputs"].items()
    }
    return OF_A_DATASET[node["class_type"]].execute(**inputs).args[0]


def _datasets(job: Job) -> list[dict[str, Any]]:
    return job.nodes("GraftLoadDataset")


def _value(node: Any, job: Job, name: str, **wires: Any) -> Any:
    """Return the first output of `node` with the job's inputs; its defaults where the job has none."""
    return node.execute(**_inputs(job, name), **wires).args[0]


def _inputs(job: Job, name: str) -> dict[str, Any]:
    nodes = job.nodes(NODES[name].kind)
    return {**NODES[name].inputs, **(_plain(nodes[0]["inputs"]) if nodes else {})}


def _plain(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that are not wires."""
    return {name: value for name, value in inputs.items() if not isinstance(value, list)}
