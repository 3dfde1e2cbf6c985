"""The shortest way through the package: a folder of pictures with .txt captions becomes batches."""

import pytest
import torch

from graft.tests.support.datasets import SMALL, FakeEncoder, add
from graft.training.data import CaptionConfig, DatasetConfig, encode, scan


@pytest.mark.feature(46)
def test_a_folder_with_captions_becomes_batches(tmp_path):
    for name in "abc":
        add(tmp_path / "set", f"{name}.png", f"the letter {name}")
    dataset = encode(scan(tmp_path / "set", SMALL), FakeEncoder(), tmp_path / "cache")
    batch = max((dataset.batch(2, seed=0, index=i) for i in range(2)), key=lambda batch: len(batch.names))
    assert batch.latents.shape == (2, 3, 8, 8) and batch.latents.dtype == torch.float32
    assert [set(entry) for entry in batch.conditioning] == [
        {"cross_attn", "pooled_output", "attention_mask"}
    ] * 2
    assert set(batch.names) < {"a.png", "b.png", "c.png"} and batch.masks is None and batch.weights is None
    assert dataset.steps_per_epoch(2) == 2


def test_a_second_run_encodes_nothing_and_gives_the_same_batches(tmp_path):
    for name in "abc":
        add(tmp_path / "set", f"{name}.png", name)
    first, again = FakeEncoder(), FakeEncoder()
    one = encode(scan(tmp_path / "set", SMALL), first, tmp_path / "cache")
    two = encode(scan(tmp_path / "set", SMALL), again, tmp_path / "cache")
    assert first.calls == (3, 4) and again.calls == (0, 0)
    assert one.fingerprint == two.fingerprint
    for index in range(5):
        a, b = one.batch(2, seed=1, index=index), two.batch(2, seed=1, index=index)
        assert a.names == b.names and torch.equal(a.latents, b.latents)


def test_all_images_are_encoded_before_the_first_caption(tmp_path):
    add(tmp_path / "set", "a.png"), add(tmp_path / "set", "b.png", "another")
    order = []
    encoder = FakeEncoder()
    images, texts = encoder.encode_image, encoder.encode_text
    encoder.encode_image = lambda pixels: (order.append("image"), images(pixels))[1]
    encoder.encode_text = lambda text: (order.append("text"), texts(text))[1]
    encode(scan(tmp_path / "set", SMALL), encoder, tmp_path / "cache")
    assert order == ["image", "image", "text", "text", "text"]


def test_the_trigger_word_reaches_the_text_encoder(tmp_path):
    add(tmp_path / "set", "a.png", "a photo of [trigger]"), add(tmp_path / "set", "b.png", "a cat")
    config = DatasetConfig(bucket=SMALL.bucket, caption=CaptionConfig(trigger="sks"))
    encode(scan(tmp_path / "set", config), encoder := FakeEncoder(), tmp_path / "cache")
    assert encoder.texts == ["a photo of sks", "", "sks, a cat"]
