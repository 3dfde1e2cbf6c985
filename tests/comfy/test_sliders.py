"""Sliders on ComfyUI's own classes: one LoRA, two directions, and nothing at strength 0."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graft.training.adapters.build import ADAPTERS, attach, restore_adapters
from graft.training.adapters.strength import at_strength
from graft.training.comfy.files.trained_lora import with_lora
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import AdapterConfig, MemoryConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from graft.training.loop import initial_state, train
from graft.training.model import Batch, Captions, SliderTexts
from graft.training.objective.parts import parts_of
from graft.training.run.saved_state import load_state, save_state

from ..support.tiny_models import TINY

SD3 = TINY["sd35m"]
CONFIG = TrainConfig(
    adapter=AdapterConfig(rank=4),
    optimizer=OptimizerConfig(lr=3e-3),
    memory=MemoryConfig(dtype="fp32"),
)
POSITIVE, NEGATIVE, NEUTRAL, ANCHOR = 100, 101, 102, 103
STRENGTHS = (-1.0, 0.0, 1.0)


def texts(word, count=1):
    return Captions([SD3.conditioning(word)] * count)


class Words:
    """Pictures, and a slider between two texts."""

    fingerprint = "words"

    def batch(self, size, *, seed, index):
        slider = SliderTexts(texts(POSITIVE), texts(NEGATIVE), texts(NEUTRAL), guidance=1.0)
        return replace(SD3.batch((index % 6,)), slider=slider)

    def preserved_captions(self, size, *, seed, index):
        return texts(ANCHOR)


class Pairs:
    """Pairs of pictures that differ in the mean of one channel, with equal captions."""

    fingerprint = "pairs"

    def batch(self, size, *, seed, index):
        high, low = (self.end(index, shift) for shift in (1.5, -1.5))
        return replace(high, opposite=low)

    def end(self, index, shift):
        batch = SD3.batch((index % 6,))
        latents = batch.latents.clone()
        latents[:, 0] += shift
        return replace(batch.with_captions(texts(NEUTRAL)), latents=latents)


def denoiser():
    return ComfyDenoiser(SD3())


def outputs(model, state, strength=1.0, word=NEUTRAL):
    """The denoised latents of noise for a text, with the LoRA of a state at a strength."""
    x = torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(7)).to(model.device)
    batch, sigma = Batch(x, texts(word, 4).conditioning), torch.full((4,), 0.7, device=model.device)
    with torch.no_grad(), model.hold(torch.float32) as base:
        weights = state.weights if state else {}
        adapters = restore_adapters(model.specs, CONFIG.adapter, weights, model.device)
        with attach(base.layers, adapters), at_strength(strength):
            return model.denoise(x, sigma, batch).cpu()


@pytest.fixture(scope="module")
def words():
    return train(denoiser(), Words(), CONFIG, None, steps=40)


def along(state, axis, word=NEUTRAL):
    """How far each strength goes along an axis from the base, as a share of the axis."""
    model = denoiser()
    base = outputs(model, state, 0.0, word)
    moved = [outputs(model, state, strength, word) - base for strength in STRENGTHS]
    return [((each * axis).sum() / axis.square().sum()).item() for each in moved]


@pytest.mark.feature(33, 154)
def test_a_slider_from_words_moves_the_output_between_its_texts(words):
    model = denoiser()
    axis = outputs(model, None, word=POSITIVE) - outputs(model, None, word=NEGATIVE)
    places = along(words, axis)
    assert places[0] < -0.3 and places[1] == 0 and places[2] > 0.3


def test_at_strength_0_the_output_is_the_bases_bit_for_bit(words):
    model = denoiser()
    assert torch.equal(outputs(model, words, 0.0), outputs(model, None))


def test_the_stock_loader_renders_every_strength(words):
    model = denoiser()
    base = outputs(model, None)
    for strength in (-1.0, -0.5, 0.5, 1.0):
        patched, _ = with_lora(model.patcher, None, words, model.family, strength)
        stock = outputs(ComfyDenoiser(patched), None) - base
        own = outputs(model, words, strength) - base
        assert (stock - own).norm() <= 1e-4 * own.norm()


@pytest.mark.feature(154)
def test_a_slider_from_pairs_moves_what_differs_within_them():
    state = train(denoiser(), Pairs(), CONFIG, None, steps=40)
    axis = torch.zeros(4, 16, 8, 8)
    axis[:, 0] = 1.5
    places = along(state, axis)
    assert places[0] < -0.3 and places[1] == 0 and places[2] > 0.3


def test_an_anchor_is_preserved_at_both_ends(words):
    config = replace(CONFIG, objective=ObjectiveConfig(preservation=2.0))
    batch = replace(Words().batch(2, seed=0, index=0), preserved=texts(ANCHOR))
    assert [part.strength for part in parts_of(batch, config.objective)] == [1, -1, 1, -1]
    anchored, model = train(denoiser(), Words(), config, None, steps=40), denoiser()

    def drift(state, strength):
        return (outputs(model, state, strength, ANCHOR) - outputs(model, None, word=ANCHOR)).norm()

    assert all(drift(anchored, end) <= 0.3 * drift(words, end) for end in (1.0, -1.0))


@pytest.mark.parametrize("dataset", [Words(), Pairs()])
def test_both_ends_train_and_a_resumed_slider_is_bit_equal(dataset, tmp_path):
    whole = train(denoiser(), dataset, CONFIG, None, steps=4)
    save_state(train(denoiser(), dataset, CONFIG, None, steps=2), tmp_path / "state")
    resumed = train(denoiser(), dataset, CONFIG, load_state(tmp_path / "state"), steps=2)
    assert resumed.losses == whole.losses
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)


def moved(model, algorithm):
    """A state with every weight of its LoRA away from where it begins."""
    state = initial_state(model, replace(CONFIG, adapter=AdapterConfig(algorithm=algorithm, rank=16)))
    generator = torch.Generator().manual_seed(3)
    weights = {n: w + 0.1 * torch.randn(w.shape, generator=generator) for n, w in state.weights.items()}
    return replace(state, weights=weights)


@pytest.mark.parametrize("algorithm", ADAPTERS)
def test_every_method_at_a_strength_is_that_share_of_its_difference(algorithm):
    model = denoiser()
    state = moved(model, algorithm)
    with torch.no_grad(), model.hold(torch.float32) as base:
        layer = base.layers[first_layer(state)]
        adapters = restore_adapters(model.specs, state.adapter, state.weights, model.device)
        x = torch.randn(2, 3, layer.spec.shape[1], generator=torch.Generator().manual_seed(4))
        x = x.to(model.device)
        plain = layer.module(x)
        with attach(base.layers, adapters):
            whole = layer.module(x) - plain
            for strength in (-1.0, 0.0, 0.25, 2.0):
                with at_strength(strength):
                    assert torch.allclose(layer.module(x) - plain, strength * whole, atol=1e-4)


@pytest.mark.parametrize("algorithm", ADAPTERS)
def test_a_method_is_even_in_strength_exactly_where_the_stock_loader_is(algorithm):
    model = denoiser()
    state = moved(model, algorithm)
    patched = [with_lora(model.patcher, None, state, model.family, end)[0] for end in (1.0, -1.0)]
    with torch.no_grad():
        base, one, minus = (weight_of(each, first_layer(state)) for each in (model.patcher, *patched))
    even = bool((one - base + minus - base).norm() <= 1e-4 * (one - base).norm())
    assert not torch.equal(one, base) and even == ADAPTERS[algorithm].is_even_in_strength


def first_layer(state):
    return next(iter(state.weights)).rsplit(".", 1)[0]


def weight_of(patcher, path):
    """The weight of a layer with the patches of its MODEL."""
    model = ComfyDenoiser(patcher)
    with model.hold(torch.float32) as base:
        return base.layers[path].weight(torch.float32, model.device).cpu().clone()


@pytest.mark.parametrize("algorithm", ["oft", "boft"])
def test_a_method_that_is_not_is_refused_before_the_first_step(algorithm):
    class Sized(Words):
        def largest_batch(self, size):
            return self.batch(size, seed=0, index=0)

    config = replace(CONFIG, adapter=AdapterConfig(algorithm=algorithm, rank=16))
    with pytest.raises(ValueError, match=f"ComfyUI does not apply {algorithm} in proportion"):
        train(denoiser(), Sized(), config, None, steps=1)
