"""Sounds for ComfyUI's models of sound: their latents, what a step is told of them, and their lyrics."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import av
import comfy.sample
import comfy.utils
import numpy as np
import pytest
import torch

from graft.tests.support.sounds import RATE, wave, write_sound
from graft.tests.support.tiny_edits import assert_seen, sampled_arguments
from graft.tests.support.tiny_others import OTHERS
from graft.tests.support.tiny_videos import Clip, ace_vae, oobleck_vae, wan_vae
from graft.training.comfy import paths
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.encoder import ComfyEncoder
from graft.training.comfy.model.first_frame import stock_node
from graft.training.comfy.run import samples, session
from graft.training.comfy.run.graph_run import GraphRun, QueuedNode
from graft.training.config import AdapterConfig, MemoryConfig, TrainConfig
from graft.training.data import DatasetConfig, encode, scan
from graft.training.loop import initial_state, train

SOUNDS = DatasetConfig(seconds=1.5, dtype="fp32")


@pytest.fixture
def folder(tmp_path):
    write_sound(tmp_path / "sounds" / "b.wav", wave(2.0, channels=1), "a low tone")
    return write_sound(tmp_path / "sounds" / "a.wav", wave(2.0)).parent


def call_stock(name, method, **inputs):
    node = stock_node(f"nodes_audio.{name}")
    outputs = (node.execute if hasattr(node, "execute") else getattr(node(), method))(**inputs)
    return (outputs if isinstance(outputs, tuple) else outputs.result)[0]


def stock_latents(vae, samples):
    audio = {"waveform": samples[None], "sample_rate": RATE}
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(0)  # its VAE draws noise
        return call_stock("VAEEncodeAudio", "encode", vae=vae, audio=audio)["samples"]


def stock_stable_audio(clip, _):
    texts = [clip.encode_from_tokens_scheduled(clip.tokenize("")) for _ in range(2)]
    return call_stock("ConditioningStableAudio", "append", positive=texts[0], negative=texts[1], **WHOLE)


def stock_ace(clip, lyrics):
    node = stock_node("nodes_ace.TextEncodeAceStepAudio")
    return node.execute(clip, "a tone", lyrics, 1.0).result[0]


WHOLE = {"seconds_start": 0.0, "seconds_total": 2.0}
SHAPES = {"stable_audio": (1, 64, 32), "ace": (1, 8, 16, 16)}
"""Of 1.5 seconds at 44100 samples each, 2048 or 4096 a cell."""


@pytest.mark.feature(8, 149)
@pytest.mark.parametrize(
    "name, vae, stock", [("stable_audio", oobleck_vae, stock_stable_audio), ("ace", ace_vae, stock_ace)]
)
def test_sounds_from_files_train_as_stock_nodes_encode_and_describe_them(name, vae, stock, folder, tmp_path):
    (folder / "a_lyrics.txt").write_text("la la")
    tiny, vae = OTHERS[name], vae()
    denoiser = ComfyDenoiser(tiny())
    heard, encoder = [], ComfyEncoder(vae, Clip(tiny), denoiser.family)
    encode_sound = encoder.encode_sound
    encoder.encode_sound = lambda waves, rate: (heard.append(waves), encode_sound(waves, rate))[1]
    data = encode(scan(folder, SOUNDS), encoder, tmp_path / "cache")
    for index, waves in enumerate(heard):
        batch = data.sample(index)
        assert torch.equal(batch.latents, stock_latents(vae, waves))
        assert batch.latents.shape == SHAPES[name]
    given = stock(encoder.clip, "la la")
    sampled = sampled_arguments(denoiser, given, torch.randn(SHAPES[name]))
    assert_seen(denoiser, data.sample(0), sampled)
    memory = MemoryConfig(dtype="fp32")
    state = train(denoiser, data, TrainConfig(adapter=AdapterConfig(rank=2), memory=memory), None, steps=2)
    assert len(state.losses) == 2


@pytest.mark.feature(149)
def test_lyrics_reach_the_text_encoder_as_the_stock_node_of_ace_step_gives_them(folder, tmp_path):
    (folder / "a_lyrics.txt").write_text("[verse]\none two three\n")
    tiny = OTHERS["ace"]
    clip = Clip(tiny)
    encode(scan(folder, SOUNDS), ComfyEncoder(ace_vae(), clip, ComfyDenoiser(tiny()).family), tmp_path)
    asked = [each for each in clip.asked if each[0]]  # without the empty caption
    assert asked == [("a tone", {"lyrics": "[verse]\none two three"}), ("a low tone", {})]


def test_sound_for_a_vae_of_images_is_refused(folder, tmp_path):
    tiny = OTHERS["wan"]
    encoder = ComfyEncoder(wan_vae(), Clip(tiny), ComfyDenoiser(tiny()).family)
    with pytest.raises(ValueError, match="seconds: this VAE is for images and takes no sound"):
        encode(scan(folder, replace(SOUNDS)), encoder, tmp_path / "cache")


def test_samples_of_sound_are_drawn_and_sound_as_the_stock_nodes_decode_them(tmp_path, monkeypatch):
    tiny, vae, clip = OTHERS["stable_audio"], oobleck_vae(), Clip(OTHERS["stable_audio"])
    denoiser = ComfyDenoiser(tiny())
    settings = samples.SamplePrompts(
        *(clip, vae, ("a [trigger] tone",)), seconds=1.5, every=2, steps=1, cfg=1.0, sampler="euler"
    )
    assert not settings.notes(denoiser.family)
    state = initial_state(denoiser, TrainConfig(adapter=AdapterConfig(rank=2)))
    writer = samples.SampleWriter(
        *(settings, denoiser.patcher, denoiser.family, tmp_path, 0, 2), trigger="low", metadata={"prompt": {}}
    )
    monkeypatch.setattr(samples, "with_lora", lambda model, clip, *_: (model, clip))
    sampled, sample = [], comfy.sample.sample
    monkeypatch.setattr(
        comfy.sample, "sample", lambda *a, **b: sampled.append((a, sample(*a, **b))) or sampled[-1][1]
    )
    writer.on_start({0: lambda: state})
    [((_, noise, *_, positive, _, empty), latents)] = sampled
    assert clip.asked[0] == ("a low tone", {}) and positive[0][1]["seconds_total"] == 1.5
    assert noise.shape == empty.shape == (1, 64, 32)
    with torch.inference_mode():
        expected = call_stock("VAEDecodeAudio", "decode", vae=vae, samples={"samples": latents})
    [file] = tmp_path.iterdir()
    assert file.name == "step-00000000-0.flac"
    with av.open(str(file)) as opened:
        assert opened.streams.audio[0].rate == expected["sample_rate"] == 44100
        assert opened.metadata["graft_prompt"] == "a [trigger] tone" and opened.metadata["prompt"] == "{}"
        frames = [
            frame.to_ndarray() / 2.0 ** (8 * frame.format.bytes - 1) for frame in opened.decode(audio=0)
        ]
    heard = torch.from_numpy(np.concatenate(frames, 1)).reshape(-1, 2).T
    assert heard.shape == expected["waveform"][0].shape
    assert torch.allclose(heard.float(), expected["waveform"][0].clamp(-1, 1), atol=1e-3)


def test_a_run_whose_samples_are_sounds_draws_them_on_request(folder, tmp_path, monkeypatch):
    tiny, vae, clip = OTHERS["stable_audio"], oobleck_vae(), Clip(OTHERS["stable_audio"])
    denoiser = ComfyDenoiser(tiny())
    prompts = samples.SamplePrompts(
        *(clip, vae, ("a tone",)), seconds=1.5, every=9, steps=1, cfg=1.0, sampler="euler"
    )
    run = GraphRun(
        *(QueuedNode(None, {}, {}), "song", denoiser),
        encode(scan(folder, SOUNDS), ComfyEncoder(vae, clip, denoiser.family), tmp_path / "cache"),
        TrainConfig(adapter=AdapterConfig(rank=2)),
        *(None, 2),
        prompts=prompts,
    )
    monkeypatch.setattr(paths.folder_paths, "get_output_directory", lambda: str(tmp_path / "output"))
    monkeypatch.setattr(samples, "with_lora", lambda model, clip, *_: (model, clip))

    def ask(bar, step, *_):
        if step == 1:
            session.request_now(run.folder.name, "draw")

    monkeypatch.setattr(comfy.utils.ProgressBar, "update_absolute", ask)
    run.train()
    assert (run.folder / "samples" / "step-00000001-0.flac").is_file()


def test_lyrics_of_a_sample_prompt_are_given_line_by_line():
    tiny = OTHERS["ace"]
    clip, vae = Clip(tiny), SimpleNamespace(output_channels=2)
    family = ComfyDenoiser(tiny()).family
    settings = samples.SamplePrompts(clip, vae, ("piano [lyrics] [verse] / one two / three",))
    samples.Prompt(settings.prompts[0], (), family).encode(settings, clip, settings.prompts[0], (64, 64))
    assert clip.asked == [("piano", {"lyrics": "[verse]\none two\nthree"})]
