"""What a stranger's file or a client's value can put into a message: ComfyUI's queue goes on after each."""

from __future__ import annotations

import json
import os
import sys

import pytest
from PIL import Image
from safetensors.torch import save_file
from torch import ones

from graft.commands.headless.server import PromptError

HALF = "\ud83d"
BLANK = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}},
    "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
}
"""A prompt of stock nodes."""


@pytest.fixture(scope="module")
def files(comfy_server):
    """Datasets and LoRAs whose names, keys and captions hold what no log can write, and a pipe."""
    loras = comfy_server.base / "models" / "loras"
    loras.mkdir(parents=True, exist_ok=True)
    header = json.dumps({HALF: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (loras / "half_a_key.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    save_file({"plain": ones(1)}, loras / "plain.safetensors")
    for folder in ("no_caption", "half_a_caption", "damaged", "pipe"):
        (comfy_server.base / "input" / folder).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64)).save(comfy_server.base / "input" / "half_a_caption" / "a.png")
    (comfy_server.base / "input" / "half_a_caption" / "a.json").write_text(json.dumps(HALF))
    Image.new("RGB", (64, 64)).save(comfy_server.base / "input" / "pipe" / "a.png")
    if sys.platform != "win32":
        os.mkfifo(comfy_server.base / "input" / "pipe" / "a.txt")
        latin = os.fsencode(comfy_server.base / "input" / "no_caption") + b"/caf\xe9.png"
        Image.new("RGB", (64, 64)).save(os.fsdecode(latin))
        damaged = os.fsencode(comfy_server.base / "input" / "damaged") + b"/caf\xe9.png"
        with open(damaged, "wb") as file:
            file.write(b"\x89PNG\r\n\x1a\nnothing")
    return comfy_server


def dataset(**inputs):
    widgets = {
        "folder": "no_caption", "resolution": "64", "trigger": "", "missing_captions": "error", "repeats": 1,
        "caption_dropout": 0.0, "flip": False, "recursive": False, "skip_bad_images": False,
    }  # fmt: skip
    return "GraftLoadDataset", {**widgets, **inputs}


def base_model(**inputs):
    widgets = {"text_encoder_1": "from checkpoint", "vae": "from checkpoint", "dtype": "auto"}
    return "GraftLoadBaseModel", {"model": "graft_tiny_sd3.safetensors", **widgets, **inputs}


def resize(**inputs):
    return "GraftResizeLora", {
        "lora_name": "plain.safetensors", "rank": 4, "energy": 0.0, "dtype": "fp16", "name": "x", **inputs,
    }  # fmt: skip


CASES = {
    "a file's name that is not UTF-8": dataset(),
    "a damaged file of such a name": dataset(folder="damaged"),
    "a file that is a pipe": dataset(folder="pipe"),
    "a caption": dataset(folder="half_a_caption"),
    "a folder that is not there": dataset(folder=HALF),
    "a setting": dataset(resolution=HALF),
    "the trigger": dataset(folder="half_a_caption", trigger=HALF),
    "a key of a LoRA": ("GraftInspectLora", {"lora_name": "half_a_key.safetensors"}),
    "a key of a LoRA to resize": resize(lora_name="half_a_key.safetensors"),
    "the name of a LoRA": ("GraftInspectLora", {"lora_name": f"{HALF}.safetensors"}),
    "the name of a base": base_model(model=f"{HALF}x"),
    "the name of a text encoder": base_model(text_encoder_1=HALF),
    "a name to write to": resize(name=HALF),
    "an option": resize(dtype=HALF),
    "the name of a state": ("GraftLoadTrainingState", {"name": HALF}),
    "the name of a job": ("GraftTrainingJob", {"file": f"{HALF}.yaml"}),
}


@pytest.mark.parametrize("where", CASES)
def test_what_others_wrote_ends_its_own_prompt_and_the_next_one_runs(files, where):
    if sys.platform == "win32" and "file" in where:
        pytest.skip("no such files there")
    kind, inputs = CASES[where]
    prompt = {"1": {"class_type": kind, "inputs": inputs}}
    prompt["2"] = {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}
    with pytest.raises((PromptError, ValueError)) as raised:
        files.wait(files.post(prompt), timeout=600)
    assert str(raised.value).encode()
    files.run(BLANK, timeout=600)
