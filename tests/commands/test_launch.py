"""The `graft` command starts from any folder, whatever the checkout is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graft.commands.headless.server import find_comfyui
from graft.training.job.read import read_job

from ..support.checkout import ROOT, copy_checkout, make_environment, pip_install, plain_environment

BASE = Path("starter") / "base" / "graft_tiny_sd3.safetensors"
PLAN = ["--card", "8GB", "--resolution", "128"]
TOLD = "128 pixels, batch 1, lora of rank 16"
JOB = Path("example_workflows") / "jobs" / "first_lora.yaml"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A download in the custom_nodes of a ComfyUI, under another name and in a folder with spaces."""
    mine = tmp_path_factory.mktemp("a user") / "My ComfyUI"
    (mine / "custom_nodes").mkdir(parents=True)
    for entry in find_comfyui().iterdir():
        if entry.name not in ("custom_nodes", "output", "extra_model_paths.yaml"):
            os.symlink(entry, mine / entry.name)
    return copy_checkout(mine / "custom_nodes" / "graft-main (1)")


def run(command, folder, **environment):
    """Return what a command prints in `folder`; it ends with 0."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=plain_environment(**environment),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_in_a_users_comfyui_the_folder_is_the_command(checkout):
    """The ComfyUI around it is the one that it computes with; nothing else names one here."""
    comfyui = checkout.parent.parent
    command = [sys.executable, Path("custom_nodes", checkout.name), "plan", checkout / BASE, *PLAN]
    assert TOLD in run(command, comfyui)


@pytest.mark.parametrize("file", [".", "__main__.py"])
def test_it_starts_from_any_folder_whatever_lies_there(checkout, tmp_path, file):
    for name in ("nodes.py", "training.py", "graft.py"):
        (tmp_path / name).write_text(
            "raise ImportError('it is of the folder in which the command was started')"
        )
    told = run([sys.executable, checkout / file, "export-workflow", checkout / JOB], tmp_path)
    assert json.loads(told) == read_job(ROOT / JOB).prompt


def test_in_a_clone_the_environments_program_is_the_command(checkout, tmp_path):
    programs = make_environment(tmp_path / ".venv")
    pip_install(programs, "--editable", str(checkout))
    comfyui = {"COMFYUI_PATH": str(find_comfyui())}
    assert TOLD in run([programs / "graft", "plan", checkout / BASE, *PLAN], tmp_path, **comfyui)


@pytest.mark.distributed
def test_torchrun_starts_the_folder_in_every_process(checkout, tmp_path):
    graph = {
        "1": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "2": {"class_type": "SaveLatent", "inputs": {"samples": ["1", 0], "filename_prefix": "from rank 0"}},
    }
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = json.dumps(["--cpu", "--output-directory", str(tmp_path / "output")])
    worker = [checkout, "worker", tmp_path / "graph.json", "--comfyui-options", options]
    run([*torchrun, *worker], tmp_path, OMP_NUM_THREADS="1")
    assert len(list((tmp_path / "output").glob("from rank 0_*.latent"))) == 1
