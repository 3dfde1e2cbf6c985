"""Dataset From Images takes what nodes give it: a batch, or a list of pictures of any size."""

from __future__ import annotations

import pytest
import torch

from graft.tests.support.first_lora import assert_same_lora, first_lora
from graft.training.data import CaptionConfig, DatasetConfig, MaskConfig

WIDGETS = {"resolution": "64", "trigger": "", "missing_captions": "error", "caption_dropout": 0.0}
WIDGETS |= {"repeats": 1, "flip": False}


def trained_on(source, name):
    """The shipped workflow on four pictures, as a batch (node 20) or one by one (21)."""
    prompt = first_lora(name)
    gray = {"width": 64, "height": 64, "batch_size": 4, "color": 0x808080}
    prompt["20"] = {"class_type": "EmptyImage", "inputs": gray}
    prompt["21"] = {"class_type": "RebatchImages", "inputs": {"images": ["20", 0], "batch_size": 1}}
    inputs = {**WIDGETS, "images": [source, 0], "captions": "a\nb\nc\nd"}
    prompt["2"] = {"class_type": "GraftDatasetFromImages", "inputs": inputs}
    return prompt


@pytest.mark.feature(140)
def test_a_list_of_pictures_is_one_dataset_as_a_batch_is(execute, base):
    execute(trained_on("20", "batch"))
    execute(trained_on("21", "list"))
    assert len(list((base / "output" / "graft").glob("list-*"))) == 1
    assert_same_lora(base, "batch", "list")


@pytest.mark.feature(156)
def test_a_list_of_captions_goes_with_a_list_of_pictures(graft_nodes):
    node, widgets = graft_nodes["GraftDatasetFromImages"], {name: [value] for name, value in WIDGETS.items()}
    pictures = [torch.ones(1, 64, 64, 3), torch.ones(1, 64, 96, 3)]
    found = node.execute(pictures, ["a red, or\na green one", "b"], **widgets).result[0]
    assert [sample.captions for sample in found.samples] == [("a red, or\na green one",), ("b",)]


def test_what_the_node_does_not_use_of_what_it_is_given_is_said_on_it(graft_nodes):
    node, widgets = graft_nodes["GraftDatasetFromImages"], {name: [value] for name, value in WIDGETS.items()}

    def said(masks, **settings):
        config = DatasetConfig(**settings)
        given = {"masks": masks, "dataset_settings": [config], **widgets}
        return node.execute([torch.ones(1, 64, 64, 3)], ["a"], **given).ui["text"][0]

    masks = [torch.ones(1, 64, 64)]
    assert "connected masks have no effect with masks off" in said(masks, mask=MaskConfig(source="off"))
    assert "connected masks have no effect with masks alpha" in said(masks, mask=MaskConfig(source="alpha"))
    files = said(None, caption=CaptionConfig(source="txt"))
    assert "captions_from txt has no effect with images from the graph." in files
    assert "no effect" not in said(masks, mask=MaskConfig(source="auto")) + said(
        None, mask=MaskConfig(source="off")
    )
