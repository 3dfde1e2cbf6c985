"""A real server: started, killed in mid-training, started again; Finish; /free; what importing Graft
costs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import graft
from graft.commands.headless.server import ComfyUIError, PromptError, server
from graft.tests.support.small_base import put_small_base

WORKFLOW = Path(graft.__file__).parent / "example_workflows" / "api" / "first_lora.json"


def prompt(name, **train):
    graph = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    graph["2"]["inputs"] |= {"folder": "tiny", "resolution": "64"}
    graph["4"]["inputs"]["rank"] = 2
    graph["5"]["inputs"] |= {"steps": 6, "batch_size": 1, "name": name, **train}
    graph["6"]["inputs"] |= {"name": name, "dtype": "fp32"}
    graph["9"]["inputs"] |= {"width": 64, "height": 64, "batch_size": 1}
    graph["10"]["inputs"]["steps"] = 1
    return graph


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("restarted")
    put_small_base(base / "models" / "checkpoints")
    (base / "input" / "tiny").mkdir(parents=True)
    for color in ("red", "blue"):
        Image.new("RGB", (64, 64), color).save(base / "input" / "tiny" / f"{color}.png")
        (base / "input" / "tiny" / f"{color}.txt").write_text(color)
    return base


def on_progress(action, *, node="5", after=1):
    """Return an on_event that does `action` once, in its own thread, when Train Steps has done `after`
    steps.
    """
    done = []

    def on_event(kind, data):
        if kind == "progress" and data.get("node") == node and data["value"] >= after and not done:
            done.append(data)
            threading.Thread(target=action).start()

    return on_event


def loras(base):
    return {path.stem: load_file(path) for path in (base / "output" / "loras").glob("*.safetensors")}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


BLANK = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}},
    "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
}
"""The least that ComfyUI can be asked for."""


def saving_every_step(graph):
    settings = {"minutes": 0.0, "steps": 0, "keep": 2, "tensorboard": False, "lora": False}
    graph["90"] = {"class_type": "GraftCheckpointSettings", "inputs": settings}
    graph["5"]["inputs"]["checkpoint_settings"] = ["90", 0]
    return graph


@pytest.mark.feature(117)
def test_a_killed_server_resumes_and_a_finished_run_survives_free_and_restart(comfyui, folder, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # a start after the first, as users have it
    killed = saving_every_step(prompt("killed", steps=200, seed=1))
    whole = prompt("whole", steps=200, seed=1)
    with server(comfyui, folder, cpu=True) as first:
        with pytest.raises(ComfyUIError, match="ComfyUI ended with exit code"):
            first.run(killed, on_progress(first.kill, after=3))
    assert "killed" not in loras(folder)
    with server(comfyui, folder, cpu=True) as second:
        second.run(killed)
        resumed_at = int(re.findall(r"resuming at step (\d+) of 200", second.log())[-1])
        assert 2 <= resumed_at < 200
        second.run(whole)
        assert same(loras(folder)["killed"], loras(folder)["whole"])
    began = time.monotonic()
    with server(comfyui, folder, cpu=True) as third:
        started = time.monotonic() - began
        seen = []
        for _ in range(2):
            third.run(killed, lambda kind, data: seen.append((kind, data.get("node"))))
            third.free()
            third.run(BLANK)  # it frees before or after the prompt that comes next, never later
        assert seen.count(("executing", "5")) == 2 and ("progress", "5") not in seen
        assert "is already trained" in third.log()
        imported = min(map(float, re.findall(r"([\d.]+) seconds: \S*graft", third.log())))
        assert imported < 0.05 * started  # about 0.1 of 8 seconds
        if sys.platform != "win32":  # which has no such signal
            assert terminated_in_training(third) >= 3


def terminated_in_training(running):
    """Return the step that a run is saved at whose server gets SIGTERM in its fourth step or later."""
    with pytest.raises(ComfyUIError, match="ComfyUI ended with exit code"):
        running.run(
            prompt("ended", steps=100000), on_progress(running.process.terminate, after=3), timeout=300
        )
    running.process.wait(600)
    folders = (running.base / "output" / "graft").glob("ended-*/checkpoints/step-*")
    return max(int(folder.name.removeprefix("step-")) for folder in folders)


@pytest.mark.feature(121)
def test_finish_keeps_a_usable_lora_and_lets_the_rest_of_the_graph_run(comfy_server, folder):
    (comfy_server.base / "input" / "tiny").mkdir(parents=True, exist_ok=True)
    for path in (folder / "input" / "tiny").iterdir():
        (comfy_server.base / "input" / "tiny" / path.name).write_bytes(path.read_bytes())

    def finish():
        run = next((comfy_server.base / "output" / "graft").glob("finished-*")).name
        comfy_server.request(f"/graft/finish/{run}", {})

    comfy_server.run(prompt("finished", steps=100000), on_progress(finish, after=2), timeout=300)
    assert loras(comfy_server.base)["finished"]
    assert list((comfy_server.base / "output" / "graft").glob("first_lora_*.png"))
    with pytest.raises(ValueError, match="404|no run named"):
        comfy_server.request("/graft/finish/finished", {})


@pytest.mark.feature(121)
def test_cancel_ends_a_long_run_and_the_next_prompt_runs(comfy_server, folder):
    with pytest.raises(PromptError, match="interrupted"):
        comfy_server.run(
            prompt("stopped", steps=100000), on_progress(comfy_server.interrupt, after=2), timeout=300
        )
    comfy_server.run(prompt("next", steps=1), timeout=300)
    assert "next" in loras(comfy_server.base) and "stopped" not in loras(comfy_server.base)


def test_a_server_writes_utf8_also_where_python_heeds_no_environment(comfyui, tmp_path, monkeypatch):
    def started(command, **options):
        raise OSError(*command[1:3])

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(OSError, match="utf8"), server(comfyui, tmp_path, cpu=True):
        pass
