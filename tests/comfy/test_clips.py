"""Clips for video models: their latents, the first frame that is given, and what a step makes of both."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import av
import comfy.sample
import comfy.utils
import pytest
import torch
from comfy_api.input_impl import VideoFromFile
from PIL import Image

import nodes
from graft.tests.support.card import PRETENDED
from graft.tests.support.clips import decoded, moving, write_clip
from graft.tests.support.datasets import add
from graft.tests.support.memory import measured
from graft.tests.support.recorded import recorded
from graft.tests.support.tiny_others import OTHERS
from graft.tests.support.tiny_videos import FIRST_FRAMES, WAN_I2V, Clip, wan_vae
from graft.training.adapters.build import attach, restore_adapters, select
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.encoder import ComfyEncoder
from graft.training.comfy.model.first_frame import stock_node
from graft.training.comfy.run import routes, samples
from graft.training.config import (
    AdapterConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
)
from graft.training.data import BucketConfig, DatasetConfig, encode, scan
from graft.training.loop import initial_state, train
from graft.training.memory.estimate import estimate_step
from graft.training.model import Batch
from graft.training.objective.loss import draw_loss, loss_at

CONFIG = TrainConfig(adapter=AdapterConfig(rank=4))
CLIPS = DatasetConfig(
    frames=9, first_frame=1.0, dtype="fp32", bucket=BucketConfig(resolutions=(64,), square=True)
)


class Case:
    """A video model with its VAE and a dataset of one clip of 9 frames; `mixed` has an image too."""

    def __init__(self, name, folder):
        self.tiny, vae = FIRST_FRAMES[name]
        self.vae, self.denoiser = vae(), ComfyDenoiser(self.tiny())
        self.path = write_clip(folder / name / "a.mp4", moving(9))
        self.encoder = ComfyEncoder(self.vae, Clip(self.tiny), self.denoiser.family)
        self.data = encode(scan(self.path.parent, CLIPS), self.encoder, folder / name / "cache")
        self.frames = decoded(self.path)
        write_clip(folder / name / "mixed" / "a.mp4", moving(9))
        add(folder / name / "mixed", "b.png", "a still")
        self.mixed = encode(scan(folder / name / "mixed", CLIPS), self.encoder, folder / name / "cache")

    def stock(self):
        """The CONDITIONING and LATENT of the stock node that takes this model's first frame."""
        text = self.encoder.clip.encode_from_tokens_scheduled("")
        known = {"positive": text, "negative": text, "vae": self.vae, "strength": 1.0, "batch_size": 1}
        known |= {"width": 64, "height": 64, "length": 9}
        node = stock_node(self.denoiser.family.first_frame)
        if "Wan22" in node.__name__:
            first = {"start_image": self.frames[:1]}
            return text, node.execute(self.vae, 64, 64, 9, 1, **first).result[0]
        first = {"image" if "LTX" in node.__name__ else "start_image": self.frames[:1]}
        allowed = {k: v for k, v in known.items() if k != "strength" or "LTX" in node.__name__}
        with torch.inference_mode():
            positive, _, latent = node.execute(**allowed, **first).result
        return positive, latent


@pytest.fixture(scope="module", params=FIRST_FRAMES)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp("clips"))


def test_the_latents_of_a_clip_are_those_of_stock_vae_encode(case):
    with torch.inference_mode():
        [stock] = nodes.VAEEncode().encode(case.vae, case.frames)
    assert torch.equal(case.data.batch(1, seed=0, index=0).latents, stock["samples"])


@pytest.mark.feature(147)
def test_a_step_is_given_the_first_frame_as_the_sampler_gives_it_after_the_stock_node(case, monkeypatch):
    calls, denoiser = recorded(case.denoiser, monkeypatch), case.denoiser
    positive, latent = case.stock()
    with torch.inference_mode():
        comfy.sample.sample(
            *(denoiser.patcher, torch.randn(latent["samples"].shape), 1, 1.0, "euler", "normal"),
            *(positive, positive, latent["samples"]),
            noise_mask=latent.get("noise_mask"),
            disable_pbar=True,
            seed=1,
        )
    sampled = calls.pop()
    batch = case.data.batch(1, seed=0, index=0)
    with torch.no_grad(), denoiser.hold(torch.float32):
        denoiser.denoise(sampled["x"].clone(), sampled["t"].clone(), batch)
    trained = calls.pop()
    keys = sampled.keys() - {"control", "transformer_options"}
    assert trained.keys() - {"control", "transformer_options"} == keys and not calls
    for key in keys:
        same = torch.equal if isinstance(sampled[key], torch.Tensor) else lambda a, b: a == b
        assert same(trained[key], sampled[key]), key
    assert {"denoise_mask", "c_concat"} & keys


def test_frames_that_are_given_stay_clean_and_out_of_the_loss(case, monkeypatch):
    calls, denoiser = recorded(case.denoiser, monkeypatch), case.denoiser
    batch = case.data.batch(1, seed=0, index=0)
    x0 = denoiser.scale_latents(batch.latents)
    noise, sigma = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0)), torch.tensor([0.6])
    other = noise.clone()
    other[:, :, 0] += 1.0
    with torch.no_grad(), denoiser.hold(torch.float32):
        one, two = (loss_at(denoiser, batch, x0, sigma, each) for each in (noise, other))
    given = "denoise_mask" in batch.conditioning[0]
    assert given == torch.equal(one, two)
    assert given == torch.equal(calls[0]["x"][:, :, 0], x0[:, :, 0])
    assert not torch.equal(calls[0]["x"][:, :, 1], x0[:, :, 1])


def test_clips_and_images_train_alike_with_checkpointed_blocks_and_without(case):
    """LTX-Video too, whose first step in each mode fails and is computed again with copies."""
    if PRETENDED and case.denoiser.family.name == "LTXV":
        pytest.skip("an error in a backward pass on the pretended card ends the process, in torch")
    assert {case.mixed.batch(1, seed=0, index=i).latents.shape[2] == 1 for i in range(2)} == {True, False}
    one, other = (
        train(case.denoiser, case.mixed, replace(CONFIG, memory=memory), None, steps=2)
        for memory in (MemoryConfig(dtype="fp32", checkpointing=mode) for mode in ("none", "block"))
    )
    assert one.losses == other.losses
    assert all(torch.equal(other.weights[name], tensor) for name, tensor in one.weights.items())


@pytest.mark.skipif(PRETENDED, reason="there a view counts like a copy")
def test_the_memory_of_a_step_with_frames_is_estimated_within_a_tenth(case):
    if case.denoiser.family.name == "LTXV":
        pytest.skip("it changes in place what autograd kept, which only a run finds out")
    batch = case.data.largest_batch(2)
    adapted = select(case.denoiser.specs, case.denoiser.family, CONFIG.adapter)
    for mode in ("none", "block"):
        estimate = estimate_step(case.denoiser, adapted, CONFIG.adapter, batch, mode, torch.float32)
        live, saved = measured(case.denoiser, batch, CONFIG, mode)
        assert estimate.saved == pytest.approx(saved, rel=0.1), mode
        assert estimate.peak == pytest.approx(live.peak, rel=0.1), mode


def test_a_share_of_the_clips_is_trained_without_its_first_frame_and_the_same_ones_again(tmp_path):
    case = Case("ltxv", tmp_path)
    images = scan(case.path.parent, replace(CLIPS, first_frame=0.5))
    data = encode(images, case.encoder, tmp_path / "cache")
    given = ["denoise_mask" in data.batch(1, seed=0, index=i).conditioning[0] for i in range(40)]
    assert 10 < sum(given) < 30
    assert given == ["denoise_mask" in data.batch(1, seed=0, index=i).conditioning[0] for i in range(40)]
    plain = encode(scan(case.path.parent, replace(CLIPS, first_frame=0.0)), case.encoder, tmp_path / "cache")
    assert "denoise_mask" not in plain.batch(1, seed=0, index=0).conditioning[0]


def test_a_video_of_comfyuis_own_is_trained_as_its_file_is(tmp_path, graft_nodes):
    case = Case("wan_i2v", tmp_path)
    widgets = {"resolution": "64", "trigger": "", "missing_captions": "error", "caption_dropout": 0.0}
    widgets |= {"repeats": 1, "flip": False, "frames": 9}
    given = {"videos": [VideoFromFile(str(case.path))], "captions": ["a clip"]}
    only = {name: [value] for name, value in widgets.items()}
    videos = graft_nodes["GraftDatasetFromVideos"].execute(**given, **only).result[0]
    batch = encode(videos, case.encoder, tmp_path / "cache").batch(1, seed=0, index=0)
    stored = case.data.batch(1, seed=0, index=0).latents.bfloat16().float()
    # From 0.33 on ComfyUI no longer rounds frames to 8 bits.
    assert (batch.latents - stored).norm() <= 0.05 * stored.norm() and batch.captions == ["a clip"]


def test_clips_for_a_vae_of_images_are_refused_before_anything_is_encoded(tmp_path, monkeypatch):
    case = Case("wan_i2v", tmp_path)
    monkeypatch.setattr(case.vae, "latent_dim", 2)
    with pytest.raises(
        ValueError, match="frames: this VAE is for images and takes no clips; set frames to 0"
    ):
        encode(scan(case.path.parent, CLIPS), case.encoder, tmp_path / "cache")


class Repeating:
    """Clips of one color each, of which a sample is given its own first frame, or another's."""

    fingerprint = "repeating"

    def __init__(self, exchanged=False, seed=0):
        self.exchanged, self.seed = exchanged, seed

    def batch(self, size, *, seed, index):
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        clips = torch.randn(size, 16, 1, 1, 1, generator=generator).expand(size, 16, 3, 4, 4)
        mask = torch.ones(1, 1, 3, 4, 4)
        mask[:, :, 0] = 0
        text = WAN_I2V.conditioning(0)
        conditioning = [
            {**text, "concat_latent_image": clip[None], "concat_mask": mask}
            for clip in (clips.roll(1, 0) if self.exchanged else clips)
        ]
        return Batch(clips, conditioning)


LEARNING = TrainConfig(
    batch_size=16,
    adapter=AdapterConfig(rank=64, targets="everything"),
    optimizer=OptimizerConfig(lr=6e-3),
    objective=ObjectiveConfig(sigmas="uniform", min_noise=0.9),
    memory=MemoryConfig(dtype="fp32"),
)


def held_out(denoiser, weights, exchanged):
    """The loss on clips of other colors."""
    adapters = restore_adapters(denoiser.specs, LEARNING.adapter, weights, denoiser.device)
    data, goal = Repeating(exchanged, seed=1), LEARNING.objective
    with torch.no_grad(), denoiser.hold(torch.float32) as base, attach(base.layers, adapters):
        losses = [
            draw_loss(denoiser, data.batch(8, seed=0, index=i), goal, seed=0, index=i)[0] for i in range(4)
        ]
    return float(torch.stack(losses).mean())


@pytest.mark.feature(8, 147)
def test_an_expert_learns_to_go_on_from_the_first_frame():
    denoiser = ComfyDenoiser(WAN_I2V())
    fresh = initial_state(denoiser, LEARNING).weights
    trained = train(denoiser, Repeating(), LEARNING, None, steps=200).weights
    before = [held_out(denoiser, fresh, exchanged) for exchanged in (False, True)]
    right, wrong = (held_out(denoiser, trained, exchanged) for exchanged in (False, True))
    assert before[0] == pytest.approx(before[1], rel=0.05)
    assert right <= 0.5 * wrong


def test_a_wan_vae_takes_one_frame_and_then_four_at_a_time(tmp_path):
    encoder = ComfyEncoder(wan_vae(), Clip(WAN_I2V), ComfyDenoiser(WAN_I2V()).family)
    assert [encoder.clip_frames(count) for count in (1, 4, 5, 8, 9, 33, 81)] == [1, 1, 5, 5, 9, 33, 81]


def test_samples_of_a_video_model_are_animated_for_the_node_and_a_video_on_disk(tmp_path, monkeypatch):
    tiny, shown = OTHERS["wan"], []
    model = tiny()
    monkeypatch.setattr(samples, "with_lora", lambda model, clip, *_: (model, clip))
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda *args, **_: shown.append(args[2][1].size))
    chosen = {"frames": 9, "fps": 8.0, "width": 64, "height": 96, "steps": 1, "every": 1}
    settings = samples.SamplePrompts(Clip(tiny), wan_vae(), ("a walk", "a run"), **chosen)
    family, texts = ComfyDenoiser(model).family, {"prompt": {"1": {"class_type": "KSampler"}}}
    writer = samples.SampleWriter(settings, model, family, tmp_path / "samples", 0, 1, metadata=texts)
    writer.draw(SimpleNamespace(step=1, weights={}), [0, 1])
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == [f"step-00000001-{index}.{kind}" for index in (0, 1) for kind in ("mp4", "webp")]
    with Image.open(tmp_path / "samples" / names[1]) as animated:
        animated.load()
        assert (animated.n_frames, animated.size, animated.info["duration"]) == (9, (64, 96), 125)
    with av.open(str(tmp_path / "samples" / names[0])) as video:
        assert json.loads(video.metadata["prompt"]) == texts["prompt"]
        assert json.loads(video.metadata["graft_prompt"]) == "a walk"
        assert video.streams.video[0].average_rate == 8
    assert len(decoded(tmp_path / "samples" / names[0])) == 9 and shown == [(64, 96)] * 2
    assert [row["name"] for row in routes.list_files(tmp_path)["samples"]] == names[1::2]
    writer.draw = None  # what is there is not drawn again
    writer.on_start({1: None})
    images = replace(settings, vae=SimpleNamespace(latent_dim=2), cfg=4.0)
    assert any("frames 9 of Sample Prompts: this VAE is for images" in note for note in images.notes(family))


@pytest.mark.parametrize("name", ["wan_i2v", "wan_5b"])
def test_samples_of_image_to_video_begin_with_the_image_of_their_prompt(name, monkeypatch):
    tiny, vae = FIRST_FRAMES[name]
    denoiser = ComfyDenoiser(tiny())
    monkeypatch.setattr(samples, "with_lora", lambda model, clip, *_: (model, clip))
    images = torch.rand(2, 32, 32, 3, generator=torch.Generator().manual_seed(0))
    chosen = {"frames": 5, "width": 32, "height": 32, "steps": 1, "cfg": 1.0}
    settings = samples.SamplePrompts(Clip(tiny), vae(), ("a", "b"), images=(images,), **chosen)
    calls = recorded(denoiser, monkeypatch)
    drawn = list(samples.draw_samples(settings, denoiser.patcher, SimpleNamespace(step=0), denoiser.family))
    assert [len(frames) for frames in drawn] == [5, 5] and not settings.notes(denoiser.family)
    for call, image in zip(calls, images, strict=True):
        with torch.inference_mode():
            first = denoiser.scale_latents(settings.vae.encode(image[None]))
        shown = call["x"][:, :, :1] if "denoise_mask" in call else call["c_concat"][:, 4:, :1]
        torch.testing.assert_close(shown, first, rtol=1e-4, atol=1e-4)


def test_samples_of_a_model_that_needs_a_first_frame_are_said_to_say_little_without_one():
    family = ComfyDenoiser(WAN_I2V()).family
    settings = samples.SamplePrompts(Clip(WAN_I2V), wan_vae(), ("a walk",), frames=9)
    assert any("connect image1 of Sample Prompts" in note for note in settings.notes(family))
