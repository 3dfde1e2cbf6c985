"""The validation loss is one number for one set of weights, whoever asks and whenever."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graft.training import objective, rng
from graft.training.loop import initial_state, train
from graft.training.validation import LEVELS, NOISE_SEED, held_out_loss, noise_levels, validation_loss

from .test_laws import CONFIG
from .tiny import Flow, TinyDataset, TinyDenoiser


class TinySamples:
    """Images that TinyDataset never shows."""

    fingerprint = "held-out"

    def __init__(self, count=3):
        self.count = count

    def __len__(self):
        return self.count

    def sample(self, index):
        batch = TinyDataset().batch(1, seed=0, index=index)
        latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(100 + index))
        return dataclasses.replace(batch, latents=latents, weights=torch.full((1,), 7.0))


def test_validation_is_bit_deterministic():
    assert validation_loss(TinyDenoiser(), TinySamples()) == validation_loss(TinyDenoiser(), TinySamples())


def test_a_fresh_adapter_has_the_validation_loss_of_the_base():
    denoiser = TinyDenoiser()
    start = initial_state(denoiser, CONFIG)
    assert validation_loss(denoiser, TinySamples(), state=start) == validation_loss(denoiser, TinySamples())


def test_a_trained_adapter_has_another_validation_loss_than_the_base():
    denoiser = TinyDenoiser()
    trained = train(denoiser, TinyDataset(), CONFIG, None, steps=5)
    assert validation_loss(denoiser, TinySamples(), state=trained) != validation_loss(denoiser, TinySamples())


def test_validation_is_the_mean_over_samples_and_noise_levels():
    denoiser, samples, losses = TinyDenoiser(), TinySamples(2), []
    for index in range(2):
        batch = dataclasses.replace(samples.sample(index), weights=None)
        noise = torch.randn(1, 4, 8, 8, generator=rng.generator(NOISE_SEED, "validation", index))
        for level in LEVELS:
            sigma = torch.tensor([level])
            losses.append(objective.loss_at(denoiser, batch, batch.latents, sigma, noise).item())
    assert validation_loss(denoiser, samples) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_validation_inside_a_run_measures_the_base_that_is_held():
    denoiser = TinyDenoiser()
    alone = validation_loss(denoiser, TinySamples())
    with denoiser.hold(torch.float32):
        assert held_out_loss(denoiser, TinySamples()) == alone


def test_a_limit_measures_evenly_spread_samples():
    seen = []
    samples = TinySamples(10)
    samples.sample = lambda index: seen.append(index) or TinySamples.sample(samples, index)
    validation_loss(TinyDenoiser(), samples, limit=3)
    assert seen == [0, 3, 6]


def test_models_that_are_not_flow_are_measured_at_fractions_of_their_schedule():
    class Eps(Flow):
        sigma_max = torch.tensor(14.6)

        def noise_scaling(self, sigma, noise, latent_image):
            return latent_image + sigma * noise

        def percent_to_sigma(self, percent):
            return 14.6 * (1 - percent) ** 2

    assert noise_levels(Eps()).tolist() == pytest.approx([14.6 * level**2 for level in LEVELS], rel=1e-5)


def test_an_empty_held_out_set_is_refused():
    with pytest.raises(ValueError, match="at least one image"):
        validation_loss(TinyDenoiser(), TinySamples(0))
