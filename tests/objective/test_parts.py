"""The parts of a loss by their formulas: sliders from words and from pairs, and preservation."""

from dataclasses import replace

import pytest
import torch

from graft.training.adapters.strength import apply_strength, at_strength
from graft.training.config import ObjectiveConfig
from graft.training.model import Batch, Captions, SliderTexts
from graft.training.objective.parts import parts_of, require_strengths, with_largest_parts

from ..support.adapter_cases import case
from ..support.tiny import TinyDenoiser

LORA = 1.0
BASE = {"neutral": 0.1, "positive": 0.8, "negative": 0.5, "own": 0.3, "class": 0.2}
X0, NOISE = torch.randn(2, 2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
SIGMA = torch.tensor([0.3, 0.6])


class Said(TinyDenoiser):
    """The base's network gives one value for each word, and the LoRA adds 1 at full strength."""

    def __init__(self):
        super().__init__()
        self.words = []

    def denoise(self, x_t, sigma, batch):
        self.words += [batch.conditioning[0]["word"]]
        base = torch.stack([torch.full_like(x_t[0], BASE[c["word"]]) for c in batch.conditioning])
        output = apply_strength(lambda y: y + LORA, lambda y: y, base)
        return self.sampling.calculate_denoised(sigma, output, x_t)


def captions(word):
    return Captions([{"word": word}] * 2, (word,) * 2)


def measure(batch, config=ObjectiveConfig(), denoiser=None):  # noqa: B008 - frozen
    """The parts of the loss, as (weight, strength, loss)."""
    found, denoiser = [], denoiser or Said()
    for part in parts_of(batch, config):
        with at_strength(part.strength):
            loss = part.compute(denoiser, batch, X0, SIGMA, NOISE, config)
        found.append((part.weight, part.strength, loss.item()))
    return found


def own(**fields):
    return Batch(X0, captions("own").conditioning, **fields)


def test_each_end_of_a_slider_learns_its_way_from_the_neutral_text_on_the_base():
    denoiser, slider = Said(), SliderTexts(*map(captions, ("positive", "negative", "neutral")), guidance=2.0)
    found = measure(own(slider=slider), denoiser=denoiser)
    loss = pytest.approx((LORA - 2.0 * (BASE["positive"] - BASE["negative"])) ** 2, rel=1e-4)
    assert found == [(0.5, 1.0, loss), (0.5, -1.0, loss)]
    assert sorted(denoiser.words) == ["negative", "neutral", "neutral", "neutral", "positive"]


def test_each_end_of_a_pair_learns_its_picture_at_its_strength_and_the_same_noise():
    other = torch.randn(X0.shape, generator=torch.Generator().manual_seed(1))
    found = measure(own(opposite=replace(own(), latents=other)))
    expected = [
        (0.5, s, pytest.approx((BASE["own"] + s * LORA - (NOISE - x0)).square().mean().item(), rel=1e-4))
        for s, x0 in ((1.0, X0), (-1.0, other))
    ]
    assert found == expected


def test_preservation_holds_each_part_to_the_base_whatever_masks_and_weights_say():
    batch = own(masks=torch.zeros(2, 1, 8, 8), weights=torch.zeros(2), preserved=captions("class"))
    config = ObjectiveConfig(preservation=0.6, preservation_share=0.5)
    held = pytest.approx(LORA**2, rel=1e-4)
    assert measure(batch, config) == [(1.0, 1.0, 0.0), (pytest.approx(1.2), 1.0, held)]
    found = measure(replace(batch, opposite=own()), config)
    assert [(weight, strength) for weight, strength, _ in found] == [
        (0.5, 1.0), (0.5, -1.0), (pytest.approx(0.6), 1.0), (pytest.approx(0.6), -1.0)
    ]  # fmt: skip
    assert [loss for *_, loss in found[2:]] == [held, held]


def test_memory_is_planned_for_preservation_wherever_a_run_has_it():
    assert with_largest_parts(own(), ObjectiveConfig()).preserved is None
    batch = with_largest_parts(own(captions=("own",) * 2), ObjectiveConfig(preservation=0.5))
    assert batch.preserved == captions("own")


def test_a_slider_takes_methods_that_comfyui_applies_in_proportion_alone():
    texts = SliderTexts(*map(captions, ("positive", "negative", "neutral")), guidance=2.0)
    slider = parts_of(own(slider=texts), ObjectiveConfig())
    adapters = {name: {"a": case(name, "linear")[1]} for name in ("lora", "oft")}
    require_strengths(slider, adapters["lora"])
    require_strengths(parts_of(own(), ObjectiveConfig()), adapters["oft"])
    with pytest.raises(ValueError, match="does not apply oft in proportion"):
        require_strengths(slider, adapters["oft"])
