"""Dataset Report: the pictures that are in the way of a training are its worst."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from graft.nodes.measure import DatasetReport
from graft.tests.support.datasets import SMALL, FakeEncoder, add, picture
from graft.training.comfy.dataset.folders import name_of
from graft.training.comfy.files.trained_lora import with_lora
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import AdapterConfig, MemoryConfig, OptimizerConfig, TrainConfig
from graft.training.data import CaptionConfig, encode, scan
from graft.training.data.picture_report import MISFIT, NOT_LEARNED, compare, judge
from graft.training.data.samples import ImageSet, Sample, SampleTable
from graft.training.loop import train
from graft.training.validation import sample_losses

from ..support.tiny_models import TINY

SD3 = TINY["sd35m"]
CONFIG = TrainConfig(
    batch_size=4,
    adapter=AdapterConfig(rank=16),
    optimizer=OptimizerConfig(lr=5e-3),
    memory=MemoryConfig(dtype="fp32"),
)
COUNT, THINGS, EMPTY = 28, 7, 99
NOISE, EXCHANGED = 5, (10, 18)


class Pictures:
    """28 pictures of seven things, each with the caption of its thing; as a dataset and as samples."""

    def __init__(self, flawed):
        self.fingerprint = f"pictures {flawed}"
        things = SD3.batch(range(THINGS)).latents
        own = torch.randn(COUNT, *things.shape[1:], generator=torch.Generator().manual_seed(5))
        self.latents = torch.stack([things[i % THINGS] + 0.2 * own[i] for i in range(COUNT)])
        self.captions = [i % THINGS for i in range(COUNT)]
        if flawed:
            self.latents[NOISE] = 3 * own[NOISE]
            one, other = EXCHANGED
            self.captions[one], self.captions[other] = self.captions[other], self.captions[one]

    def __len__(self):
        return COUNT

    def batch(self, size, *, seed, index):
        chosen = torch.randperm(COUNT, generator=torch.Generator().manual_seed(index))[:size].tolist()
        captions = [EMPTY if index % 5 == 0 else self.captions[i] for i in chosen]
        return self._read(chosen, captions)

    def sample(self, index):
        return self._read([index], [self.captions[index]])

    def sample_without_caption(self, index):
        return self._read([index], [EMPTY])

    def _read(self, chosen, captions):
        batch = replace(SD3.batch(chosen), latents=self.latents[chosen])
        return replace(batch, conditioning=[SD3.conditioning(caption) for caption in captions])


@pytest.fixture(scope="module")
def taught():
    """A model that knows the seven things by their captions."""
    model = ComfyDenoiser(SD3())
    state = train(model, Pictures(flawed=False), CONFIG, None, steps=100)
    return with_lora(model.patcher, None, state, model.family)[0]


@pytest.mark.feature(157)
def test_two_exchanged_captions_and_a_picture_of_noise_are_the_worst_three(taught):
    model, flawed = ComfyDenoiser(taught), Pictures(flawed=True)
    config = replace(CONFIG, optimizer=OptimizerConfig(lr=1e-3), adapter=AdapterConfig(rank=4))
    before = train(model, flawed, config, None, steps=20)
    trained = ComfyDenoiser(with_lora(taught, None, before, model.family)[0])
    losses = [sample_losses(each, flawed) for each in (model, trained)]
    names = SampleTable([Sample(f"{i}.png", 8, 8, ("",)) for i in range(COUNT)])
    report = judge(compare(ImageSet(names, ()), range(COUNT), *losses))
    worst = {each.picture.position: each.verdict for each in report[:3]}
    assert worst == {NOISE: NOT_LEARNED, **dict.fromkeys(EXCHANGED, MISFIT)}
    assert not [each for each in report[3:] if each.verdict == MISFIT]

    assert losses[1] == sample_losses(trained, flawed), "measured twice, the same"
    after = train(model, flawed, config, None, steps=3)
    assert after.losses == before.losses[:3], "a report changes nothing in training"


class TinyEncoder(FakeEncoder):
    """A VAE and a text encoder of the tiny model's shapes."""

    reduction = 8

    def latent_shape(self, width, height):
        return 16, height // 8, width // 8

    def encode_image(self, pixels):
        return super().encode_image(pixels).repeat(1, 6, 1, 1)[:, :16]

    def encode_text(self, caption):
        return SD3.conditioning(len(caption))


def test_the_node_shows_names_numbers_and_pictures(tmp_path):
    for seed, name in enumerate(("a", "b", "c")):
        add(tmp_path / "set", f"{name}.png", name * seed, picture(96, 64, seed=seed))
    config = replace(SMALL, caption=CaptionConfig(missing="empty"))
    dataset = encode(scan(tmp_path / "set", config), TinyEncoder(), tmp_path / "cache")
    found = DatasetReport.execute(SD3(), SD3(seed=1), dataset, 2)
    text, data, sheet = found.result
    pictures = json.loads(data)
    assert [line.split()[-1] for line in text.splitlines()[1:]] == [each["image"] for each in pictures]
    assert {each["image"] for each in pictures} == {"a.png", "b.png", "c.png"}
    empty = next(each["loss"] for each in pictures if each["image"] == "a.png")
    assert empty["base"] == empty["base_without_caption"] != empty["lora"]
    assert all(
        each["loss"]["base"] != each["loss"]["base_without_caption"]
        for each in pictures
        if each["image"] != "a.png"
    )
    assert sheet.shape[0] == 1 and sheet.shape[2] == 2 * 216 and sheet.std() > 0.1
    assert found.ui["text"] == [text] and len(found.ui["images"]) == 1
    rows = found.ui["graft_report"]
    assert [row["name"] for row in rows] == [each["image"] for each in pictures]
    assert [name_of(row["key"]) for row in rows] == [row["name"] for row in rows]
    assert {row["source"] for row in rows} == {0} and all(row["note"].endswith("%") for row in rows)
