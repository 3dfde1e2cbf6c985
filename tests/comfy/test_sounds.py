"""Sounds for ComfyUI's models of sound: their latents, what a step is told of them, and their lyrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graft.tests.support.sounds import RATE, wave, write_sound
from graft.tests.support.tiny_others import OTHERS
from graft.tests.support.tiny_videos import Clip, oobleck_vae, wan_vae
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.encoder import ComfyEncoder
from graft.training.comfy.model.first_frame import stock_node
from graft.training.comfy.run import samples
from graft.training.config import AdapterConfig, MemoryConfig, TrainConfig
from graft.training.data import DatasetConfig, encode, scan
from graft.training.loop import train

SOUNDS = DatasetConfig(seconds=1.5, dtype="fp32")


@pytest.fixture
def folder(tmp_path):
    write_sound(tmp_path / "sounds" / "b.wav", wave(2.0, channels=1), "a low tone")
    return write_sound(tmp_path / "sounds" / "a.wav", wave(2.0)).parent


def stock_latents(vae, samples):
    node, audio = stock_node("nodes_audio.VAEEncodeAudio"), {"waveform": samples[None], "sample_rate": RATE}
    encode = node.execute if hasattr(node, "execute") else node().encode
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(0)  # its VAE draws noise
        outputs = encode(vae=vae, audio=audio)
    return (outputs if isinstance(outputs, tuple) else outputs.result)[0]["samples"]


def test_stable_audio_trains_on_the_latents_of_the_stock_node_and_knows_the_seconds(folder, tmp_path):
    tiny, vae = OTHERS["stable_audio"], oobleck_vae()
    denoiser = ComfyDenoiser(tiny())
    heard, encoder = [], ComfyEncoder(vae, Clip(tiny), denoiser.family)
    encode_sound = encoder.encode_sound
    encoder.encode_sound = lambda waves, rate: (heard.append(waves), encode_sound(waves, rate))[1]
    data = encode(scan(folder, SOUNDS), encoder, tmp_path / "cache")
    for index, waves in enumerate(heard):
        batch = data.sample(index)
        assert torch.equal(batch.latents, stock_latents(vae, waves))
        assert batch.latents.shape == (1, 64, 32)  # 1.5 seconds at 44100 samples each, 2048 a cell
    calls, embed = [], denoiser.model.seconds_total_embedder.forward
    denoiser.model.seconds_total_embedder.forward = lambda given: (calls.extend(given), embed(given))[1]
    memory = MemoryConfig(dtype="fp32")
    state = train(denoiser, data, TrainConfig(adapter=AdapterConfig(rank=2), memory=memory), None, steps=2)
    assert len(state.losses) == 2 and set(calls) == {2.0}


def test_lyrics_reach_the_text_encoder_as_the_stock_node_of_ace_step_gives_them(folder, tmp_path):
    (folder / "a_lyrics.txt").write_text("[verse]\none two three\n")
    tiny = OTHERS["ace"]
    clip = Clip(tiny)
    encode(scan(folder, SOUNDS), ComfyEncoder(oobleck_vae(), clip, ComfyDenoiser(tiny()).family), tmp_path)
    asked = [each for each in clip.asked if each[0]]  # without the empty caption
    assert asked == [("a tone", {"lyrics": "[verse]\none two three"}), ("a low tone", {})]


def test_sound_for_a_vae_of_images_is_refused(folder, tmp_path):
    tiny = OTHERS["wan"]
    encoder = ComfyEncoder(wan_vae(), Clip(tiny), ComfyDenoiser(tiny()).family)
    with pytest.raises(ValueError, match="seconds: this VAE is for images and takes no sound"):
        encode(scan(folder, replace(SOUNDS)), encoder, tmp_path / "cache")


def test_samples_of_sound_are_not_drawn_and_the_node_says_so(tmp_path):
    family = ComfyDenoiser(OTHERS["stable_audio"]()).family
    settings = samples.SamplePrompts(Clip(OTHERS["stable_audio"]), oobleck_vae(), ("a tone",), every=1)
    assert any("draws no sound" in note for note in settings.notes(family))
    writer = samples.SampleWriter(settings, None, family, tmp_path, 0, 4)
    writer.draw_if_due(2, handles=None)
    assert writer.steps_due(4) == [] and not list(tmp_path.iterdir())
