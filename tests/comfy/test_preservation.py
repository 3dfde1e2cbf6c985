"""Preservation without pictures, on ComfyUI's classes: the LoRA learns at its trigger, not elsewhere."""

from __future__ import annotations

from dataclasses import replace
from tempfile import TemporaryDirectory

import pytest
import torch

from graft.training.adapters.build import attach, restore_adapters
from graft.training.adapters.strength import at_strength
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import AdapterConfig, MemoryConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from graft.training.data import from_latents
from graft.training.data.given_latents import GivenSample
from graft.training.loop import initial_state, train
from graft.training.model import Batch, Captions
from graft.training.objective.loss import draw_loss
from graft.training.objective.parts import parts_of
from graft.training.objective.preservation import is_due
from graft.training.run.saved_state import load_state, save_state

from ..support.tiny_models import TINY

SD3 = TINY["sd35m"]
CONFIG = TrainConfig(
    batch_size=2,
    adapter=AdapterConfig(rank=4),
    optimizer=OptimizerConfig(lr=6e-3),
    memory=MemoryConfig(dtype="fp32"),
)
PRESERVED = replace(CONFIG, objective=ObjectiveConfig(preservation=2.0))
TRIGGER, CLASS, OTHER = 100, 101, 102
"""Words: what stands in the first place of a caption."""


def caption(word, image):
    """A caption of a word and seven others, as a text encoder gives it."""
    subject, rest = SD3.conditioning(word), SD3.conditioning(image)
    return {
        "cross_attn": torch.cat([subject["cross_attn"][:, :4], rest["cross_attn"][:, 4:]], 1),
        "pooled_output": (subject["pooled_output"] + rest["pooled_output"]) / 2**0.5,
    }


class Subject:
    """Six pictures of a subject, each with the trigger word among others."""

    fingerprint = "subject"

    def batch(self, size, *, seed, index):
        images = self.images(size, index)
        return replace(SD3.batch(images), conditioning=[caption(TRIGGER, i) for i in images])

    def preserved_captions(self, size, *, seed, index):
        return Captions([caption(CLASS, i) for i in self.images(size, index)])

    def images(self, size, index):
        return tuple((size * index + i) % 6 for i in range(size))


def denoiser():
    return ComfyDenoiser(SD3())


def outputs(model, state, captions, strength=1.0):
    """What the network makes of noise with a LoRA, for each caption."""
    count = len(captions)
    x = torch.randn(count, 16, 8, 8, generator=torch.Generator().manual_seed(7)).to(model.device)
    batch, sigma = Batch(x, captions), torch.full((count,), 0.6, device=model.device)
    with torch.no_grad(), model.hold(torch.float32) as base:
        adapters = restore_adapters(model.specs, state.adapter, state.weights, model.device)
        with attach(base.layers, adapters), at_strength(strength):
            return model.denoise(x, sigma, batch)


def drift(model, state, captions):
    return (outputs(model, state, captions) - outputs(model, state, captions, strength=0)).norm().item()


@pytest.fixture(scope="module")
def runs():
    """States after 80 steps: without preservation, and with it."""
    return [train(denoiser(), Subject(), config, None, steps=80) for config in (CONFIG, PRESERVED)]


@pytest.mark.feature(153)
def test_other_captions_stay_as_they_were_at_about_the_same_loss(runs):
    model, (plain, preserved) = denoiser(), runs
    others = [caption(word, image) for word in (CLASS, OTHER) for image in (6, 7, 8)]
    assert drift(model, preserved, others) <= 0.3 * drift(model, plain, others)
    states = (initial_state(model, CONFIG), plain, preserved)
    before, without, with_it = (loss(model, state) for state in states)
    assert without < 0.8 * before and with_it <= 1.03 * without


def loss(model, state):
    """The mean loss of all pictures at fixed noise."""
    batch = Subject().batch(6, seed=0, index=0)
    with torch.no_grad(), model.hold(torch.float32) as base:
        adapters = restore_adapters(model.specs, state.adapter, state.weights, model.device)
        with attach(base.layers, adapters):
            draws = [draw_loss(model, batch, CONFIG.objective, seed=9, index=i)[0] for i in range(8)]
    return torch.stack(draws).mean().item()


def parts(model, state, config):
    """{part of the loss: (value, gradients)} of the first micro-batch."""
    captions = Subject().preserved_captions(2, seed=0, index=0)
    batch = replace(Subject().batch(2, seed=0, index=0), preserved=captions)
    found = {}
    with torch.enable_grad(), model.hold(torch.float32) as base:
        adapters = restore_adapters(model.specs, state.adapter, state.weights, model.device)
        with attach(base.layers, adapters):
            for part in parts_of(batch, config.objective):
                loss, _ = draw_loss(model, batch, config.objective, seed=0, index=0, compute=part.compute)
                parameters = [p for adapter in adapters.values() for p in adapter.parameters()]
                found[part.compute.__name__] = (
                    loss.item(),
                    torch.autograd.grad(loss, parameters, allow_unused=True),
                )
    return found


def test_a_fresh_lora_has_nothing_to_preserve_and_a_trained_one_has(runs):
    model = denoiser()
    assert parts(model, initial_state(model, CONFIG), PRESERVED)["preservation_at"][0] == 0
    value, gradients = parts(model, runs[0], PRESERVED)["preservation_at"]
    assert value > 0 and any(g is not None and g.abs().max() > 0 for g in gradients)


def test_the_target_is_the_base_and_gradients_go_through_the_adapted_pass_alone(runs, monkeypatch):
    model, state, seen = denoiser(), runs[0], []
    denoise = model.denoise

    def watch(x_t, sigma, batch):
        result = denoise(x_t, sigma, batch)
        seen.append((result.detach(), result.requires_grad))
        return result

    monkeypatch.setattr(model, "denoise", watch)
    parts(model, state, PRESERVED)
    assert [graph for _, graph in seen] == [True, False, True]
    (_, _), (target, _), (adapted, _) = seen
    assert not torch.equal(target, adapted)
    seen.clear()
    parts(model, initial_state(model, CONFIG), PRESERVED)
    assert torch.equal(seen[1][0], target), "the base's own output, whatever the LoRA"


def test_a_resumed_run_is_bit_equal(tmp_path):
    config = replace(PRESERVED, objective=ObjectiveConfig(preservation=0.7, preservation_share=0.5))
    whole = train(denoiser(), Subject(), config, None, steps=5)
    save_state(train(denoiser(), Subject(), config, None, steps=3), tmp_path / "state")
    resumed = train(denoiser(), Subject(), config, load_state(tmp_path / "state"), steps=2)
    assert resumed.losses == whole.losses
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)


def test_a_dataset_without_an_empty_caption_is_refused_before_the_first_step():
    latents = [GivenSample("a", torch.zeros(16, 8, 8), SD3.conditioning(0))]
    with TemporaryDirectory() as folder:
        dataset = from_latents(latents, folder)
        config = replace(CONFIG, objective=ObjectiveConfig(preservation=1.0, preservation_share=0.25))
        seen = []
        with pytest.raises(ValueError, match="connect it to empty_caption of Dataset From Latents"):
            train(denoiser(), dataset, config, None, steps=4, on_step=lambda *step: seen.append(step))
        assert not seen
        whole = from_latents(latents, folder, dropped=SD3.conditioning(9))
        [preserved] = whole.preserved_captions(1, seed=0, index=0).conditioning
        expected = SD3.conditioning(9)["cross_attn"].bfloat16().float()
        assert torch.equal(preserved["cross_attn"], expected)


@pytest.mark.parametrize("share, due", [(1.0, 12), (0.5, 6), (0.25, 3), (0.3, 3)])
def test_a_share_of_the_steps_is_spread_evenly(share, due):
    config = ObjectiveConfig(preservation=1.0, preservation_share=share)
    steps = [step for step in range(12) if is_due(config, step)]
    assert len(steps) == due and max(b - a for a, b in zip(steps, steps[1:])) <= -(-1 // share)
    assert not any(is_due(replace(config, preservation=0.0), step) for step in range(12))
