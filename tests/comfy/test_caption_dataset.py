"""Caption Dataset on ComfyUI's own text encoders, and on lists of other nodes."""

from __future__ import annotations

from types import SimpleNamespace

import comfy.sd
import pytest
import torch

from graft.nodes.caption_dataset import CaptionDataset, DatasetImages
from graft.tests.support.datasets import SMALL, add, picture
from graft.tests.support.tiny_clips import clip_of
from graft.tests.support.tiny_models import fill
from graft.training.comfy import paths
from graft.training.data import CaptionConfig, DatasetConfig, scan
from graft.training.data.captioning import CaptioningConfig
from graft.training.user_error import UserError

WRITES = hasattr(comfy.sd.CLIP, "generate")
WIDGETS = {"template": ["{caption}"], "longest": [8], "seed": [0], "write": [True]}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(paths.folder_paths, "get_output_directory", lambda: str(tmp_path / "output"))


@pytest.fixture
def images(tmp_path):
    """Two images without a caption and one with."""
    for seed, name in enumerate("abc"):
        add(tmp_path / "set", f"{name}.png", "mine" if name == "c" else None, picture(96, 64, seed=seed))
    return scan(tmp_path / "set", DatasetConfig(bucket=SMALL.bucket, caption=CaptionConfig(missing="empty")))


def captions_in(node_output):
    return {sample.name: sample.captions[0] for sample in node_output.args[0].samples}


@pytest.fixture
def qwen(monkeypatch):
    """A tiny random Qwen3-VL of ComfyUI's own classes."""
    module = pytest.importorskip("comfy.text_encoders.qwen3vl", reason="this ComfyUI has no Qwen3-VL")
    sight = dict(hidden_size=32, intermediate_size=64, depth=2, deepstack_visual_indexes=[0])
    monkeypatch.setitem(module.QWEN3VL_VISION, "qwen3vl_4b", sight)
    monkeypatch.setitem(module.QWEN3VL_VISION_COMMON, "num_heads", 2)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    cpu = torch.device("cpu")
    options = {"load_device": cpu, "offload_device": cpu, "dtype": torch.float32}
    parts = {"clip": module.te(model_type="qwen3vl_4b"), "tokenizer": module.tokenizer("qwen3vl_4b")}
    options["qwen3vl_4b_model_config"] = sizes | heads
    clip = comfy.sd.CLIP(SimpleNamespace(params={}, **parts), model_options=options)
    fill(clip.cond_stage_model, 1)
    return clip


def test_a_text_encoder_that_sees_captions_each_image_and_not_twice(images, qwen, monkeypatch):
    first = captions_in(CaptionDataset.execute([images], clip=[qwen], **WIDGETS))
    assert first["c.png"] == "mine" and first["a.png"] and first["a.png"] != first["b.png"]
    root = images.sources[0].root
    assert (root / "a.txt").read_text() == first["a.png"] + "\n"
    monkeypatch.setattr(qwen, "generate", None)
    again = CaptionDataset.execute([scan(root, images.sources[0].config)], clip=[qwen], **WIDGETS)
    assert captions_in(again) == first and "2 captioned before" in again.ui["text"][0]


@pytest.mark.parametrize("change", [{"seed": [1]}, {"instruction": ["Name the color."]}])
def test_another_seed_or_instruction_asks_again(images, qwen, change):
    first = captions_in(CaptionDataset.execute([images], clip=[qwen], **WIDGETS))
    later = scan(images.sources[0].root, images.sources[0].config)
    other = captions_in(CaptionDataset.execute([later], clip=[qwen], **{**WIDGETS, **change}))
    assert other["a.png"] != first["a.png"] and other["c.png"] == "mine"


def test_a_text_encoder_that_does_not_see_or_a_comfyui_without_is_refused(images):
    wanted = "does not see images; load one that does" if WRITES else "this ComfyUI is too old"
    with pytest.raises(UserError, match=f"clip: .*{wanted}.*connect the captions of another node"):
        CaptionDataset.execute([images], clip=[clip_of("sd15")], **WIDGETS)


def test_a_list_of_another_node_gives_the_captions_in_the_order_of_dataset_images(images):
    shown, before, names = DatasetImages.execute(images, 64).args
    assert names == ["a.png", "b.png", "c.png"] and before == ["", "", "mine"]
    assert [tuple(image.shape) for image in shown] == [(1, 52, 78, 3)] * 3
    texts = [f"a picture of {image.mean():.3f}" for image in shown]
    found = captions_in(CaptionDataset.execute([images], captions=texts, **WIDGETS))
    assert found == {"a.png": texts[0], "b.png": texts[1], "c.png": "mine"}


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({}, "neither is connected"),
        ({"clip": [object()], "captions": ["x"]}, "both are connected"),
        ({"captions": ["x", "y"]}, "captions: 2 for 3 images; give one for each"),
    ],
)
def test_what_is_wrong_with_the_wires_is_told(images, inputs, reason):
    with pytest.raises(UserError, match=reason):
        CaptionDataset.execute([images], **inputs, **WIDGETS)


def test_the_widgets_are_the_fields_of_the_config():
    names = {entry.id for entry in CaptionDataset.define_schema().inputs} - {"dataset", "clip", "captions"}
    assert names == set(CaptioningConfig.__dataclass_fields__)
