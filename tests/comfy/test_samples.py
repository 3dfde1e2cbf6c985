"""Samples while training, in ComfyUI's own executor: they show what is learnt and change nothing in it."""

from __future__ import annotations

import json
import logging

import comfy.model_management
import comfy.sample
import comfy.utils
import pytest
import torch
from PIL import Image

from graft.training.comfy import grid
from graft.training.comfy import samples as samples_module
from graft.training.run import latest

from .test_first_lora import assert_same_lora, first_lora, lora


@pytest.fixture(scope="module", autouse=True)
def images(base):
    folder = base / "input" / "tiny"
    folder.mkdir(exist_ok=True)
    for number, colour in enumerate(("red", "green", "blue", "white")):
        Image.new("RGB", (64, 64 + 32 * (number % 2)), colour).save(folder / f"{colour}.png")
        (folder / f"{colour}.txt").write_text(f"a {colour} square")


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
        **values,
    }
    prompt["40"] = {
        "class_type": "GraftSamplePrompts",
        "inputs": {"clip": ["1", 1], "vae": ["1", 2], **given},
    }
    prompt["5"]["inputs"]["sample_prompts"] = ["40", 0]
    return prompt


def plain(name, **train):
    prompt = first_lora(name, steps=4, **train)
    prompt["2"]["inputs"]["trigger"] = "sks"
    return prompt


def folder_of(base, name):
    return next((base / "output" / "graft").glob(f"{name}-*"))


def drawn(base, name):
    return {path.name: path for path in sorted((folder_of(base, name) / "samples").glob("*"))}


def test_samples_are_saved_with_the_workflow_and_the_state_is_bit_equal_without_them(execute, base):
    execute(sampled("with_samples"))
    execute(plain("without_samples"))
    assert_same_lora(base, "with_samples", "without_samples")
    found = drawn(base, "with_samples")
    assert list(found) == [f"step-{step:08d}-{number}.png" for step in (0, 2, 4) for number in (0, 1)]
    with Image.open(found["step-00000004-0.png"]) as image:
        assert image.size == (64, 96) and image.text["graft_prompt"] == "a [trigger] square"
        assert json.loads(image.text["prompt"])["5"]["class_type"] == "GraftTrainSteps"


def test_samples_show_the_lora_of_their_step_and_the_trigger(base):
    found = {name: Image.open(path).tobytes() for name, path in drawn(base, "with_samples").items()}
    assert found["step-00000000-0.png"] != found["step-00000004-0.png"]
    assert found["step-00000004-0.png"] != found["step-00000004-1.png"]


def test_samples_are_shown_on_the_node(execute, monkeypatch):
    shown = []

    def hook(value, total, preview, node_id=None, **_):
        if preview is not None and node_id == "5":
            shown.append((value, total, preview[0], preview[1].size))

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    execute(sampled("shown", prompts="a square"))
    assert shown == [(step, 4, "JPEG", (64, 96)) for step in (0, 2, 4)]


def test_an_error_in_the_sampler_costs_the_pictures_and_not_the_run(execute, base, monkeypatch, caplog):
    def broken(model, *args, **options):
        raise ValueError("no such sampler")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(samples_module, "_sample", broken)
        execute(sampled("broken_sampler"))
    assert (
        "no samples of step 2" in caplog.text and not (folder_of(base, "broken_sampler") / "samples").exists()
    )
    assert_same_lora(base, "broken_sampler", "without_samples")


@pytest.mark.parametrize(("fits", "sizes"), [(32 * 48, {(32, 48)}), (0, set())])
def test_memory_that_runs_out_costs_size_and_then_the_picture(
    execute, base, monkeypatch, caplog, fits, sizes
):
    draw = samples_module._sample

    def small(plan, model, clip, prompt, seed, width, height):
        if width * height > fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return draw(plan, model, clip, prompt, seed, width, height)

    name = f"out_of_memory_{fits}"
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(samples_module, "_sample", small)
        execute(sampled(name))
    assert {Image.open(path).size for path in drawn(base, name).values()} == sizes
    assert "memory does not suffice for the sample 'a sks square' at 64x96" in caplog.text
    assert_same_lora(base, name, "without_samples")


def test_a_decoder_without_room_decodes_in_tiles(execute, base, monkeypatch):
    tiled = []
    decode_tiled = comfy.sd.VAE.decode_tiled_

    def no_room(self, *args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def counted(self, *args, **options):
        tiled.append(1)
        with monkeypatch.context() as patch:
            patch.setattr(type(self.first_stage_model), "decode", decode)
            return decode_tiled(self, *args, **options)

    prompt = sampled("tiles", every=4, before_training=False, prompts="a square")
    from comfy.taesd.taesd import TAESD

    decode = TAESD.decode
    with monkeypatch.context() as patch:
        patch.setattr(TAESD, "decode", no_room)
        patch.setattr(comfy.sd.VAE, "decode_tiled_", counted)
        execute({key: node for key, node in prompt.items() if key not in ("9", "10", "11", "12")})
    assert tiled and [Image.open(path).size for path in drawn(base, "tiles").values()] == [(64, 96)]


def test_cancel_inside_the_sampler_keeps_the_step_and_the_samples_are_made_up_for(execute, base, monkeypatch):
    calls = []
    sample = comfy.sample.sample

    def cancelled(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise comfy.model_management.InterruptProcessingException
        return sample(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(comfy.sample, "sample", cancelled)
        execute(sampled("cancelled_samples", before_training=False))
    run = samples_module.Path(folder_of(base, "cancelled_samples"))
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    for path in drawn(base, "cancelled_samples").values():
        path.unlink()
    execute(sampled("cancelled_samples", before_training=False))
    assert_same_lora(base, "cancelled_samples", "without_samples")
    assert len(drawn(base, "cancelled_samples")) == 4
