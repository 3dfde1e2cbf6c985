"""The requests of docs/api.md, sent as they stand there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time

import pytest

from graft.tests.support.card import PRETENDED
from graft.tests.support.checkout import ROOT
from graft.tests.support.first_lora import first_lora, four_squares, lora

pytestmark = [
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl"),
    pytest.mark.skipif(PRETENDED, reason="a server of its own has no card"),
]
BLOCKS = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def comfy(comfy_server):
    return comfy_server


def block(part):
    """Return the only block of commands with `part` in it."""
    (found,) = (text for text in BLOCKS if part in text)
    return found


def send(comfy, command, run=""):
    """Return the JSON that a command of the page prints."""
    command = command.replace("localhost:8188", comfy.address).replace("RUN", run)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout) if done.stdout else None


@pytest.mark.feature(138)
def test_the_complete_graph_trains_saves_and_can_be_followed(comfy):
    answer = send(comfy, block("<<'END'"))
    comfy.wait(answer["prompt_id"])
    assert (comfy.base / "output" / "loras" / "my_lora.safetensors").is_file()
    runs, log, files, _ = block("graft/log").splitlines()
    run = next(found["run"] for found in send(comfy, runs)["runs"] if found["run"].startswith("my_lora-"))
    told = send(comfy, log, run)
    assert [entry["step"] for entry in told["entries"]] == list(range(1, 21)) and told["next"] > 0
    assert {"loss", "lr", "grad_norm", "seconds", "smoothed", "validation", "time_left"} <= told["entries"][
        0
    ].keys()
    assert send(comfy, files, run)["checkpoints"][-1] == 20


def test_the_slider_of_the_page_trains_on_top_of_a_graph(execute, base):
    four_squares(base)
    graph = {key: node for key, node in first_lora("slider", steps=2).items() if int(key) < 7}
    graph |= json.loads(f"{{{block('GraftSliderFromWords').strip().rstrip(',')}}}")
    execute(graph)
    tensors, metadata = lora(base, "slider")
    assert any(key.endswith("lora_up.weight") and tensor.any() for key, tensor in tensors.items())
    assert json.loads(metadata["graft_slider"])["negative"] == "green apple"


def test_a_template_is_queued_finished_and_cancelled(comfy):
    answer = send(comfy, block("cat example_workflows"))
    finish, cancel = block("graft/finish").splitlines()

    def live():
        return [
            found["run"] for found in comfy.request("/graft/runs")["runs"] if "first_lora" in found["run"]
        ]

    while not live() and comfy.history(answer["prompt_id"]) is None:
        time.sleep(0.1)
    (run,) = live()
    while (told := send(comfy, finish, run)) != {"finishing": run}:
        assert comfy.history(answer["prompt_id"]) is None, told
    send(comfy, cancel)
    while (ended := comfy.history(answer["prompt_id"])) is None:
        time.sleep(0.1)
    kinds = [kind for kind, _ in ended["status"]["messages"]]
    assert kinds[-1] in ("execution_interrupted", "execution_success")
