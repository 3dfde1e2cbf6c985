"""A job file against the nodes: its graph is one that ComfyUI accepts and runs."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

import graft
from graft import __main__ as launch
from graft.commands.export_workflow import as_text
from graft.commands.train import extra_data
from graft.tests.support.jobs import ERIDIFFUSION, images, small
from graft.tests.support.small_base import put_small_base
from graft.training.job.graph import NODES
from graft.training.job.read import compile_job, read_job

ROOT = Path(graft.__file__).parent
JOB = ROOT / "example_workflows" / "jobs" / "first_lora.yaml"


def widgets(node):
    """Names and defaults of a node's inputs that are no wires."""
    schema = node.INPUT_TYPES()
    every = {**schema.get("required", {}), **schema.get("optional", {})}
    plain = {
        name: spec for name, spec in every.items()
        if isinstance(spec[0], list) or spec[0] in ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")
    }  # fmt: skip
    return plain, set(schema.get("required", {}))


@pytest.mark.parametrize("name", NODES)
def test_the_graph_sets_inputs_that_the_nodes_have_to_their_own_defaults(graft_nodes, name):
    node = NODES[name]
    known, required = widgets(graft_nodes[node.kind])
    assert node.inputs.keys() <= known.keys() and required & known.keys() <= node.inputs.keys()
    for key, value in node.inputs.items():
        options = known[key][1] if len(known[key]) > 1 else {}
        if "default" in options:
            assert options["default"] == value, key


def test_a_job_with_every_kind_of_node_runs(execute, base):
    sample = {"prompts": ["red"], "width": 64, "height": 64, "sample_every": 1, "sample_steps": 1}
    more = {"train": {"steps": 2, "timestep_type": "linear", "dtype": "fp32", "lr": 1e-3}, "sample": sample}
    job = compile_job(small(base / "input" / "job images", **more), base / "elsewhere")
    for node in job.nodes("GraftLoadDataset"):
        node["inputs"]["folder"] = "job images"
    execute(job.prompt, extra_data={"extra_pnginfo": {"graft_job": {"meta": {"version": "1.0"}}}})
    with safe_open(base / "output" / "loras" / "job.safetensors", "pt") as file:
        assert any("lokr" in key for key in file.keys())
        assert json.loads(file.metadata()["graft_job"]) == {"meta": {"version": "1.0"}}
    assert list((base / "output" / "graft").glob("job-*/samples/*.png"))


def test_an_assistant_lora_is_on_the_model_while_training(execute, base):
    def first_loss(**model):
        model = {"name_or_path": "graft_tiny_sd3.safetensors", **model}
        train = {"steps": 1, "optimizer": "adamw", "lr": 1e-2}
        job = compile_job(small(base / "input" / "job images", model=model, train=train), base / "elsewhere")
        for node in job.nodes("GraftLoadDataset"):
            node["inputs"]["folder"] = "job images"
        execute(job.prompt)
        logs = (base / "output" / "graft").glob("job-*/log.jsonl")
        newest = max(logs, key=lambda file: file.stat().st_mtime)
        return json.loads(newest.read_text().splitlines()[0])["loss"]

    alone = first_loss()
    saved = base / "output" / "loras" / "job.safetensors"
    loras = base / "models" / "loras"
    loras.mkdir(parents=True, exist_ok=True)
    assistant = saved.rename(loras / "assistant.safetensors")
    assert first_loss(assistant_lora_path=assistant.name) != alone


@pytest.mark.feature(104)
def test_the_example_of_eridiffusions_readme_trains(execute, base):
    job = yaml.safe_load(ERIDIFFUSION)
    images(base / "input" / "job images")
    job |= {"name": "eri", "datasets": [{"folder_path": "job images", "resolution": 64}]}
    job["model"]["name_or_path"] = "graft_tiny_sd3.safetensors"
    job["train"]["steps"] = 2
    execute(compile_job(job, base / "elsewhere").prompt)
    with safe_open(base / "output" / "loras" / "eri.safetensors", "pt") as file:
        assert {len(file.get_tensor(key)) for key in file.keys() if "lora_down" in key} == {16}
    (log,) = (base / "output" / "graft").glob("eri-*/log.jsonl")
    assert steps(log) == [1, 2]


@pytest.mark.feature(93)
def test_options_of_a_job_take_effect_where_it_runs(execute, base):
    """force_recache, save_format and sqlite_db_path."""
    more = {
        "network": {"linear": 2},
        "train": {"steps": 2, "optimizer": "adamw"},
        "save": {"save_format": "diffusers"},
        "sqlite_db_path": "./aitk_db.db",
    }
    job = small(base / "input" / "job images", **more)
    job["config"]["name"] = "options"

    def written(again):
        job["config"]["process"][0]["datasets"][0] |= {"folder_path": "job images", "force_recache": again}
        execute(compile_job(job, base / "elsewhere").prompt)
        files = (base / "output" / "graft" / "cache").rglob("*.safetensors")
        return {file: file.stat().st_ino for file in files}

    first, kept, again = written(False), written(False), written(True)
    assert first == kept and any(again[file] != number for file, number in first.items())
    (saved,) = (base / "output").rglob("options.safetensors")
    with safe_open(saved, "pt") as file:
        assert all(key.endswith(("lora_A.weight", "lora_B.weight")) for key in file.keys())
    (table,) = (base / "output" / "graft").glob("options-*/log.sqlite")
    with closing(sqlite3.connect(table)) as opened:
        assert opened.execute("SELECT step FROM steps").fetchall() == [(1,), (2,)]


def test_a_job_file_stays_out_of_the_lora_with_the_workflow(execute, base):
    values = {"train": {"steps": 1, "optimizer": "adamw"}, "save": {"save_workflow": False}}
    job = compile_job(small(base / "input" / "job images", **values), base / "elsewhere")
    for node in job.nodes("GraftLoadDataset"):
        node["inputs"]["folder"] = "job images"
    execute(job.prompt, extra_data=extra_data(job))
    with safe_open(base / "output" / "loras" / "job.safetensors", "pt") as file:
        assert "graft_job" not in file.metadata()


def test_the_example_job_trains_what_the_first_workflow_trains():
    workflow = json.loads(
        (ROOT / "example_workflows" / "api" / "first_lora.json").read_text(encoding="utf-8")
    )
    drawn = {node["class_type"]: plain(node) for node in workflow.values()}
    for kind in ("LoadBaseModel", "LoadDataset", "BuildLora", "TrainSteps", "SaveLora"):
        asked = plain(read_job(JOB).nodes(f"Graft{kind}")[0])
        assert asked.items() <= drawn[f"Graft{kind}"].items()


def plain(node):
    """Inputs of a node that are no wires."""
    return {name: value for name, value in node["inputs"].items() if not isinstance(value, list)}


def test_an_exported_job_is_the_same_graph(tmp_path):
    out = tmp_path / "graph.json"
    command = [sys.executable, launch.__file__, "export-workflow", str(JOB), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text()) == read_job(JOB).prompt
    assert out.read_text() == as_text(read_job(JOB).prompt)


@pytest.mark.feature(104, 112)
@pytest.mark.skipif(sys.platform == "win32", reason="Python cannot send Ctrl-C to one process there")
def test_what_ends_a_job_saves_its_run_and_the_same_command_goes_on(tmp_path):
    """After Ctrl-C, after a request to end, and to its last step, on a server without an editor."""
    file, log = tmp_path / "job.yaml", "out/graft/job-*/log.jsonl"
    job = small(tmp_path / "squares", training_folder="out", device="cpu")
    put_small_base(tmp_path)
    train = job["config"]["process"][0]["train"]
    command, reached = [sys.executable, launch.__file__, "train", str(file)], 0
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where a shell put the tests behind &
    for asked_by, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        train["steps"], before = 5000, reached
        file.write_text(json.dumps(job))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hears) as process:
            while process.poll() is None and not any(
                found.read_text().count("\n") > before + 3 for found in tmp_path.glob(log)
            ):
                time.sleep(0.1)
            process.send_signal(asked_by)
            assert "the same command goes on from there" in process.communicate(timeout=300)[0]
        assert process.returncode == code
        reached = max(int(path.name[5:]) for path in tmp_path.glob("out/graft/job-*/checkpoints/step-*"))
        assert before + 3 < reached < 5000
    train["steps"] = reached + 3
    file.write_text(json.dumps(job))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = tmp_path.glob(log)
    assert steps(found) == list(range(1, reached + 4))
    assert (tmp_path / "out" / "loras" / "job.safetensors").exists()


def steps(log):
    return [json.loads(line)["step"] for line in log.read_text().splitlines()]
