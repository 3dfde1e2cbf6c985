"""Training on whatever ComfyUI conditions on: what a step sees is what sampling sees."""

import comfy.clip_vision
import comfy.sample
import pytest
import torch

from graft.tests.support.card import PRETENDED
from graft.tests.support.memory import measured, step_gradients
from graft.tests.support.recorded import recorded
from graft.tests.support.tiny_edits import EDITS, METHODS, edit_batch, latents, stock_conditioning
from graft.training.adapters.build import select
from graft.training.comfy.model.conditioning import as_sampled, read_conditioning
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import AdapterConfig, TrainConfig
from graft.training.memory.estimate import estimate_step
from graft.training.memory.plan import fits_surely
from graft.training.user_error import UserError

CONFIG = TrainConfig(adapter=AdapterConfig(rank=4))


@pytest.fixture(params=EDITS)
def name(request):
    if EDITS[request.param].missing:
        pytest.skip("this ComfyUI is too old for it")
    return request.param


def assert_equal(one, other, where=""):
    if isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu()), where
    else:
        assert one == other, where


def test_a_step_sees_what_the_sampler_gives_the_model_to_the_bit(name, monkeypatch):
    tiny, denoiser = EDITS[name], ComfyDenoiser(EDITS[name]())
    references = [latents(tiny, 5), latents(tiny, 6, (4, 6))]
    stock = stock_conditioning(tiny, 0, references, METHODS.get(name, ""))
    calls = recorded(denoiser, monkeypatch)
    noise = latents(tiny, 7)[None]
    with torch.inference_mode():
        comfy.sample.sample(
            *(denoiser.patcher, noise, 1, 1.0, "euler", "normal", stock, stock, torch.zeros_like(noise)),
            disable_pbar=True,
            seed=1,
        )
    sampled = calls.pop()
    batch = edit_batch(name, [references])
    with torch.no_grad(), denoiser.hold(torch.float32):
        denoiser.denoise(sampled["x"].clone(), sampled["t"].clone(), batch)
    trained = calls.pop()
    assert trained.keys() - {"control"} == sampled.keys() - {"control"}
    for key in sampled.keys() - {"control", "transformer_options"}:
        assert_equal(trained[key], sampled[key], key)
    assert not calls and any("ref" in key for key in trained)


def test_references_of_several_sizes_in_a_batch_give_what_each_gives_alone(name):
    tiny, denoiser = EDITS[name], ComfyDenoiser(EDITS[name]())
    references = [[latents(tiny, 1)], [latents(tiny, 2, (4, 6))], [latents(tiny, 3)], []]
    batch = edit_batch(name, references)
    sigma = torch.full((4,), 0.7)
    with torch.no_grad(), denoiser.hold(torch.float32):
        together = denoiser.denoise(batch.latents, sigma, batch)
        alone = [
            denoiser.denoise(batch.latents[i : i + 1], sigma[:1], _one(batch, i))
            for i in range(len(references))
        ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert not torch.equal(alone[0], _without(denoiser, batch, sigma))


def _one(batch, index):
    return type(batch)(batch.latents[index : index + 1], [batch.conditioning[index]])


def _without(denoiser, batch, sigma):
    """Return the first sample's result without its references."""
    bare = {name: value for name, value in batch.conditioning[0].items() if "reference" not in name}
    with torch.no_grad(), denoiser.hold(torch.float32):
        return denoiser.denoise(batch.latents[:1], sigma[:1], type(batch)(batch.latents[:1], [bare]))


def test_checkpointed_blocks_have_the_same_gradients_with_references(name):
    tiny, denoiser = EDITS[name], ComfyDenoiser(EDITS[name]())
    batch = edit_batch(name, [[latents(tiny, 1)], [latents(tiny, 2, (4, 6))]])
    value, expected = step_gradients(denoiser, batch, CONFIG)
    again, gradients = step_gradients(denoiser, batch, CONFIG, "block")
    assert value == again
    assert all(g is None or torch.equal(gradients[path], g) for path, g in expected.items())


@pytest.mark.skipif(PRETENDED, reason="there a view counts like a copy")
def test_the_memory_of_a_step_with_references_is_estimated_within_a_tenth(name):
    tiny, denoiser = EDITS[name], ComfyDenoiser(EDITS[name]())
    batch = edit_batch(name, [[latents(tiny, 1, (16, 24)), latents(tiny, 2, (16, 16))]] * 2, (16, 16))
    bare = edit_batch(name, [[], []], (16, 16))
    adapted = select(denoiser.specs, denoiser.family, CONFIG.adapter)
    for mode in ("none", "block"):
        estimate = estimate_step(denoiser, adapted, CONFIG.adapter, batch, mode, torch.float32)
        live, saved = measured(denoiser, batch, CONFIG, mode)
        assert estimate.saved == pytest.approx(saved, rel=0.1), mode
        assert estimate.peak == pytest.approx(live.peak, rel=0.1), mode
        without = estimate_step(denoiser, adapted, CONFIG.adapter, bare, mode, torch.float32)
        assert without.peak < 0.9 * estimate.peak, mode
        if mode == "none":
            assert not fits_surely(denoiser, adapted, CONFIG, batch, live.peak)


def vision_output():
    output = comfy.clip_vision.Output()
    output.last_hidden_state, output.image_embeds = torch.ones(1, 2, 3), torch.ones(1, 4)
    output.penultimate_hidden_states, output.mm_projected = torch.zeros(1, 2, 3), None
    return output


def test_what_clip_vision_made_is_stored_as_tensors_and_an_object_again_for_the_model():
    stored = read_conditioning([[torch.ones(1, 2, 3), {"clip_vision_output": vision_output(), "rate": 25}]])
    assert torch.equal(stored["clip_vision_output"]["image_embeds"], torch.ones(1, 4))
    sampled = as_sampled(stored)
    assert isinstance(sampled["clip_vision_output"], comfy.clip_vision.Output) and sampled["rate"] == 25
    assert vars(sampled["clip_vision_output"]).keys() == vars(vision_output()).keys()


@pytest.mark.parametrize(
    "key", ["control", "hooks", "area", "mask", "gligen", "start_percent", "end_percent"]
)
def test_what_only_the_sampler_acts_on_is_refused_by_name(key):
    value = {"start_percent": 0.2, "end_percent": 0.5}.get(key, object())
    with pytest.raises(UserError, match=f"sample 3: {key} act in the sampler and not in the model"):
        read_conditioning([[torch.ones(1, 2, 3), {key: value}]], "sample 3")


def test_what_does_nothing_in_the_sampler_is_left_out():
    options = {"start_percent": 0.0, "end_percent": 1.0, "strength": 1.0, "pooled_output": None}
    assert read_conditioning([[torch.ones(1, 2, 3), options]]).keys() == {"cross_attn"}


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "this is no CONDITIONING"),
        ({"samples": torch.ones(1)}, "this is no CONDITIONING"),
        ([[torch.ones(1, 2, 3), {}]] * 2, "has 2 entries"),
        ([[torch.ones(1, 2, 3), {"audio": [object()]}]], r"audio\[0\] is a object, which cannot be stored"),
    ],
)
def test_what_is_no_conditioning_of_one_entry_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        read_conditioning(given)
