"""Training Job: the same run from a file on a node as from the command line, and nothing read elsewhere."""

from __future__ import annotations

import copy
import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from graft.nodes.job import TrainingJob
from graft.tests.support.jobs import images, small
from graft.training.comfy.files import job_files as jobs
from graft.training.job.read import compile_job

WIRES = {
    "start": 1, "optimizer_settings": 2, "objective_settings": 3, "memory_settings": 4,
    "checkpoint_settings": 5, "sample_prompts": 6, "steps": 7, "learning_rate": 8, "batch_size": 9,
    "seed": 10,
}  # fmt: skip


@pytest.fixture
def job(base):
    """A job file in ComfyUI's input folder, its dataset beside it."""
    document = small(base / "input" / "wired")
    (base / "input" / "wired.yaml").write_text(json.dumps(document))
    yield document
    (base / "input" / "wired.yaml").unlink()


def test_the_node_trains_what_the_command_line_trains(execute, base, job):
    compiled = compile_job(job, base / "input").prompt
    execute(copy.deepcopy(compiled))
    whole = load_file(base / "output" / "loras" / "job.safetensors")
    prompt = {key: node for key, node in compiled.items() if "DatasetSettings" not in node["class_type"]}
    number = {node["class_type"]: key for key, node in prompt.items()}
    del prompt[number["GraftBuildLora"]], prompt[number["GraftLoraSettings"]]
    for kind in ("GraftLoadDataset", "GraftOptimizerSettings"):
        del prompt[number[kind]]
    prompt["file"] = {"class_type": "GraftTrainingJob", "inputs": {"file": "wired.yaml"}}
    prompt[number["GraftEncodeDataset"]]["inputs"]["dataset"] = ["file", 0]
    train = prompt[number["GraftTrainSteps"]]["inputs"]
    train |= {name: ["file", slot] for name, slot in WIRES.items()} | {"name": "by_node"}
    prompt[number["GraftSaveLora"]]["inputs"] |= {"name": "by_node"}
    execute(prompt)
    wired = load_file(base / "output" / "loras" / "by_node.safetensors")
    assert whole.keys() == wired.keys() and all(torch.equal(whole[key], wired[key]) for key in whole)


@pytest.mark.feature(127)
def test_regularisation_images_have_the_share_that_the_command_line_gives_them(base, job):
    datasets = job["config"]["process"][0]["datasets"]
    images(base / "input" / "regular")
    datasets.append({"folder_path": "regular", "resolution": 64, "is_reg": True, "num_repeats": 10})
    (base / "input" / "wired.yaml").write_text(json.dumps(job))
    joined = TrainingJob.execute("wired.yaml").args[0]
    visits = Counter()
    for sample in joined.samples:
        visits[sample.source] += sample.repeats
    assert visits == {0: 20, 1: 20}


def test_the_node_names_what_no_wire_carries(base, job):
    process = job["config"]["process"][0]
    process["datasets"][0]["force_recache"] = True
    process |= {"network": {}, "save": {"save_format": "diffusers", "save_workflow": False}}
    (base / "input" / "wired.yaml").write_text(json.dumps(job))
    lines = TrainingJob.execute("wired.yaml").ui["text"][0].splitlines()
    assert lines[1:] == [
        "set in Load Base Model: model graft_tiny_sd3.safetensors",
        "set in Encode Dataset: encode_again True",
        "set in Save LoRA: save_workflow False, format diffusers (PEFT)",
    ]


@pytest.mark.parametrize(
    "name", ["../job.yaml", "/etc/passwd", "wired", "nothing.yaml", "", "a\0.yaml", "out.yaml"]
)
def test_a_file_elsewhere_is_not_read(base, job, name, tmp_path):
    (tmp_path / "out.yaml").write_text("{}")
    link = base / "input" / "out.yaml"
    link.symlink_to(tmp_path / "out.yaml")
    try:
        with pytest.raises(ValueError, match="job file .* not found"):
            jobs.job_file(name)
    finally:
        link.unlink()


def test_a_dataset_elsewhere_is_not_read(base, job, tmp_path):
    images(tmp_path / "private")
    job["config"]["process"][0]["datasets"][0]["folder_path"] = str(tmp_path / "private")
    (base / "input" / "wired.yaml").write_text(json.dumps(job))
    with pytest.raises(ValueError, match="outside the folders that may be read"):
        jobs.load_job("wired.yaml")


def test_job_files_can_be_chosen(job):
    assert "wired.yaml" in jobs.job_files()
