"""The template first_lora at a size for tests, with Sample Prompts and without."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image
from safetensors import safe_open

import graft

WORKFLOW = Path(graft.__file__).parent / "example_workflows" / "api" / "first_lora.json"


def four_squares(base):
    """Write the images that `first_lora` trains on into ComfyUI's input folder."""
    folder = base / "input" / "four_squares"
    folder.mkdir(exist_ok=True)
    for number, color in enumerate(("red", "green", "blue", "white")):
        Image.new("RGB", (64, 64 + 32 * (number % 2)), color).save(folder / f"{color}.png")
        (folder / f"{color}.txt").write_text(f"a {color} square")
    return folder


def first_lora(name, **train):
    """The shipped workflow on four small squares, with inputs of Train Steps replaced."""
    prompt = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    prompt["2"]["inputs"] |= {"folder": "four_squares", "resolution": "64"}
    prompt["4"]["inputs"] |= {"rank": 2, "exclude": ""}
    prompt["5"]["inputs"] |= {"steps": 3, "batch_size": 2, "name": name, **train}
    prompt["6"]["inputs"] |= {"name": name, "dtype": "fp32"}
    prompt["9"]["inputs"] |= {"width": 64, "height": 64, "batch_size": 1}
    prompt["10"]["inputs"]["steps"] = 2
    return prompt


def lora(base, name):
    with safe_open(base / "output" / "loras" / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()


def assert_same_lora(base, one, other):
    (a, _), (b, _) = lora(base, one), lora(base, other)
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def sampled(name, *, train=None, **values):
    """The shipped workflow with Sample Prompts connected, drawing every second step."""
    prompt = first_lora(name, steps=4, **(train or {}))
    prompt["2"]["inputs"]["trigger"] = "sks"
    given = {
        "prompts": "a [trigger] square\n\na blue square",
        "negative": "",
        "every": 2,
        "before_training": True,
        "width": 64,
        "height": 96,
        "steps": 2,
        "cfg": 2.0,
        "sampler": "euler",
        "scheduler": "simple",
        "seed": 3,
        "walk_seed": False,
        "guidance": -1.0,
        **values,
    }
    prompt["40"] = {
        "class_type": "GraftSamplePrompts",
        "inputs": {"clip": ["1", 1], "vae": ["1", 2], **given},
    }
    prompt["5"]["inputs"]["sample_prompts"] = ["40", 0]
    return prompt
