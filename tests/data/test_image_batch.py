"""Datasets from a graph's IMAGE batch go the same way as those from a folder."""

from dataclasses import replace

import pytest
import torch

from graft.tests.support.datasets import SMALL, FakeEncoder
from graft.training.data import CaptionConfig, MaskConfig, encode, from_images
from graft.training.data.caption import LONGEST

TWO = torch.rand(2, 64, 96, 3, generator=torch.Generator().manual_seed(0))


def test_images_in_memory_become_batches_and_are_cached(tmp_path):
    images = from_images(TWO, ["one", "two"], config=SMALL)
    one, two = FakeEncoder(), FakeEncoder()
    batch = encode(images, one, tmp_path).batch(2, seed=0, index=0)
    encode(from_images(TWO.clone(), ["one", "two"], config=SMALL), two, tmp_path)
    assert sorted(batch.names) == ["image-0", "image-1"] and one.calls == (2, 3) and two.calls == (0, 0)


def test_pixels_are_not_rounded_to_eight_bits(tmp_path):
    flat = torch.full((1, 64, 64, 3), 0.123456)
    encode(from_images(flat, ["flat"], config=SMALL), encoder := FakeEncoder(), tmp_path)
    assert (encoder.images[0] - 0.123456).abs().max() < 1e-5


def test_one_caption_serves_all_and_sizes_may_differ(tmp_path):
    images = from_images([TWO, torch.rand(1, 32, 32, 3)], ["all"], config=SMALL)
    assert [(s.width, s.height, s.captions) for s in images.samples] == [
        (96, 64, ("all",)), (96, 64, ("all",)), (32, 32, ("all",))
    ]  # fmt: skip


def test_masks_and_transparency_arrive(tmp_path):
    masks = torch.zeros(2, 64, 96)
    masks[:, :, 48:] = 1
    batch = encode(from_images(TWO, ["x"], masks, SMALL), FakeEncoder(), tmp_path).batch(2, seed=0, index=0)
    assert batch.masks[0, 0, 0, 0] == 0 and batch.masks[0, 0, 0, -1] == 1
    off = replace(SMALL, mask=MaskConfig(source="off"))
    whole = encode(from_images(TWO, ["x"], masks, off), FakeEncoder(), tmp_path).batch(2, seed=0, index=0)
    assert whole.masks is None
    clear = torch.cat([TWO, masks[..., None]], dim=-1)
    config = replace(SMALL, mask=MaskConfig(source="alpha"))
    encode(from_images(clear, ["x"], config=config), encoder := FakeEncoder(), tmp_path)
    assert encoder.images[0][:, :, :16].eq(1).all() and encoder.images[0][:, :, -16:].mean() < 0.6


@pytest.mark.parametrize(
    "images, captions, masks, message",
    [
        (TWO, ["a", "b", "c"], None, "2 images but 3 captions; give one for each, or one for all"),
        (TWO, ["a"], torch.ones(3, 8, 8), "2 images but 3 masks"),
        (TWO, ["a", " "], None, "image-1: no caption"),
        (TWO[:, :4], ["a"], None, "image-0: shape .4, 96, 3.; images are .height, width, 3."),
        (TWO * torch.nan, ["a"], None, "image-0: has NaN"),
        (TWO[0, 0], ["a"], None, "expected a batch of 4 dimensions"),
        ([], ["a"], None, "no images given"),
        (TWO, ["[trigger]"], None, "no trigger word is given"),
    ],
)
def test_what_cannot_be_a_dataset_is_refused(images, captions, masks, message):
    with pytest.raises(ValueError, match=message):
        from_images(images, captions, masks)


def test_missing_captions_can_be_the_trigger(tmp_path):
    config = replace(SMALL, caption=CaptionConfig(missing="trigger", trigger="sks"))
    encode(from_images(TWO, [""], config=config), encoder := FakeEncoder(), tmp_path)
    assert encoder.texts == ["sks", ""]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a \ud83d", r"its caption holds half of a letter \('\\ud83d' at 2\)"),
        (
            "x" * (LONGEST + 1),
            f"its caption, as trained, has {LONGEST + 1} characters; shorten it to {LONGEST}",
        ),
    ],
    ids=["half a letter", "too long"],
)
def test_a_caption_that_no_text_encoder_takes_is_named(text, reason):
    with pytest.raises(ValueError, match=f"^image-1: {reason}"):
        from_images(TWO, ["fine", text], config=SMALL)
