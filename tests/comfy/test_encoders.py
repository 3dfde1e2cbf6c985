"""Encode Dataset with ComfyUI's own text encoders of every kind at a tiny size, and with its VAE."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import comfy.model_management
import comfy.sd
import comfy.sd1_clip
import comfy.text_encoders.flux as flux
import comfy.text_encoders.lumina2 as lumina2
import comfy.text_encoders.qwen_image as qwen_image
import comfy.text_encoders.qwen_vl as qwen_vl
import comfy.text_encoders.sd3_clip as sd3_clip
import pytest
import sentencepiece
import torch

from graft.nodes.base_model import LoadBaseModel
from graft.nodes.dataset import EncodeDataset, LoadDataset
from graft.tests.support import dynamic_vram
from graft.tests.support.first_lora import four_squares
from graft.tests.support.tiny_clips import tiny
from graft.tests.support.tiny_models import TINY, fill
from graft.tests.support.two_steps import CONFIG, Samples, unmoved
from graft.training.comfy.model.conditioning import read_conditioning
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.unload import is_loaded
from graft.training.loop import train

CLIP = json.loads(open(comfy.sd1_clip.__file__.replace(".py", "_config.json")).read())
CLIP |= {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
T5 = {"num_layers": 3, "num_heads": 2, "d_kv": 16, "d_ff": 64}
LLAMA = {"num_hidden_layers": 3, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 64}
LLAMA |= {"hidden_size": 64}


def clip(width):
    return {**CLIP, "hidden_size": width, "projection_dim": width}


ENCODERS = {
    "flux": (
        *(flux.flux_clip(), flux.FluxTokenizer),
        {"clip_l": clip(32), "t5xxl": {**T5, "d_model": 64}},
    ),
    "sd35m": (  # whose network concatenates CLIP with a T5 of this width
        *(sd3_clip.sd3_clip(dtype_t5=torch.bfloat16), sd3_clip.SD3Tokenizer),
        {"clip_l": clip(24), "clip_g": clip(40), "t5xxl": {**T5, "d_model": 4096}},
    ),
    "qwen": (qwen_image.te(), qwen_image.QwenImageTokenizer, {"qwen25_7b": LLAMA}),
    "lumina2": (lumina2.te(), lumina2.LuminaTokenizer, {"gemma2_2b": {**LLAMA, "vocab_size": 128}}),
}
"""Family -> its text encoders, their tokenizer, and their sizes by name."""


def spiece_model():
    """A tokenizer as Gemma's file has it, of the words of a few captions."""
    model, captions = io.BytesIO(), ["a red square on a green field", "two blue circles", "a dog in the sun"]
    settings = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(captions), model_writer=model, **settings)
    return torch.frombuffer(bytearray(model.getvalue()), dtype=torch.uint8)


@pytest.fixture
def clip_of(monkeypatch):
    """family -> a CLIP of random weights; its part for images, which no caption reaches, is small too."""
    vision = qwen_vl.Qwen2VLVisionTransformer.__init__
    small = {"num_layers": 1, "intermediate_size": 64}
    monkeypatch.setattr(
        qwen_vl.Qwen2VLVisionTransformer,
        "__init__",
        lambda self, **sizes: vision(self, **{**sizes, **small}),
    )

    @dynamic_vram.off()
    def of(family):
        model, tokenizer, sizes = ENCODERS[family]
        cpu = torch.device("cpu")
        options = {f"{name}_model_config": dict(config) for name, config in sizes.items()}
        options |= {"load_device": cpu, "offload_device": cpu, "dtype": torch.float32}
        data = {"spiece_model": spiece_model()} if family == "lumina2" else {}
        target = SimpleNamespace(params={}, clip=model, tokenizer=tokenizer)
        made = comfy.sd.CLIP(target, model_options=options, tokenizer_data=data)
        fill(made.cond_stage_model, 5)
        return made

    return of


class Encoded(Samples):
    """The two images of a family with captions as a text encoder gives them."""

    def __init__(self, tiny, captions):
        super().__init__(tiny)
        self.captions = captions

    def batch(self, size, *, seed, index):
        return replace(super().batch(size, seed=seed, index=index), conditioning=self.captions)


@pytest.fixture(scope="module")
def demo(graft_nodes):
    """MODEL, CLIP and VAE of the demo's base."""
    return LoadBaseModel.execute("graft_tiny_sd3.safetensors").args


@pytest.fixture
def squares(base):
    widgets = {"resolution": "64", "trigger": "", "missing_captions": "error", "repeats": 1}
    widgets |= {"caption_dropout": 0.0, "flip": False}
    return LoadDataset.execute(four_squares(base).name, **widgets).args[0]


@pytest.mark.feature(66)
@pytest.mark.parametrize("family", ENCODERS)
def test_a_dataset_has_what_clip_text_encode_gives_and_the_model_trains_on_it(family, clip_of, demo, squares):
    clip, network = clip_of(family), tiny(family) if family == "sd35m" else TINY[family]
    (dataset,) = EncodeDataset.execute(squares, network(), clip, demo[2], False).args
    with torch.inference_mode():
        for index in range(len(dataset)):
            sample = dataset.sample(index)
            [caption], [found] = sample.captions, sample.conditioning
            expected = read_conditioning(clip.encode_from_tokens_scheduled(clip.tokenize(caption)))
            assert found.keys() == expected.keys() and found["cross_attn"].shape[1] > 4
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=2**-8, atol=1e-5)  # kept in bf16
    texts = [dataset.sample(index).conditioning[0] for index in range(2)]
    assert not torch.equal(*(text["cross_attn"][:, -4:] for text in texts))
    denoiser = ComfyDenoiser(network())
    state = train(denoiser, Encoded(network, texts), CONFIG, None, steps=2)
    assert not unmoved(denoiser, state) and all(t.isfinite().all() for t in state.weights.values())


@pytest.mark.feature(67)
def test_an_image_that_does_not_fit_is_encoded_in_tiles(demo, squares, monkeypatch, caplog):
    model, clip, vae = demo
    (whole,) = EncodeDataset.execute(squares, model, clip, vae, True).args
    network, tiles = vae.first_stage_model, []
    encode, tile = network.encode, 32

    def of_a_small_device(pixels):
        if pixels.shape[-1] * pixels.shape[-2] > tile**2:
            raise torch.OutOfMemoryError("no room")
        tiles.append(pixels.shape)
        return encode(pixels)

    monkeypatch.setattr(network, "encode", of_a_small_device)
    tiled = vae.encode_tiled_
    monkeypatch.setattr(vae, "encode_tiled_", lambda pixels: tiled(pixels, tile, tile, 8))
    (again,) = EncodeDataset.execute(squares, model, clip, vae, True).args
    assert len(tiles) > len(again) and "tiled VAE encoding" in caplog.text
    for index in range(len(again)):
        one, other = (dataset.sample(index).latents for dataset in (whole, again))
        assert one.shape == other.shape and (one - other).norm() < 0.5 * one.norm()


@pytest.mark.feature(63)
def test_encoders_have_left_the_device_before_the_base_is_held(demo, squares):
    model, clip, vae = demo
    (dataset,) = EncodeDataset.execute(squares, model, clip, vae, True).args
    assert is_loaded(vae.patcher) and is_loaded(clip.patcher)
    loaded, held = comfy.model_management.loaded_models, []

    denoiser = ComfyDenoiser(model)

    def on_step(progress, handles):
        there = [patcher for patcher in loaded() if patcher.load_device == denoiser.device]
        left = (p.device for p in vae.first_stage_model.parameters() if p.device.type != "cpu")
        held.append([*there, *left])

    train(denoiser, dataset, replace(CONFIG, batch_size=1), None, steps=1, on_step=on_step)
    assert held == [[]]
