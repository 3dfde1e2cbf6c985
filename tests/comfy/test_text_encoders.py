"""LoRA of the CLIP text encoders on ComfyUI's own classes: tiny SD1.5, SDXL and SD3.5, the same laws."""

import contextlib
import dataclasses
import logging
from types import SimpleNamespace

import comfy.model_management
import comfy.sd
import pytest
import torch

from graft.nodes.measure import MemoryPlan
from graft.nodes.train import TrainSteps
from graft.tests.support.card import PRETENDED
from graft.tests.support.memory import measured
from graft.tests.support.tiny_clips import CONFIG, ENCODERS, WIDTHS, clip_of, tiny
from graft.tests.support.tiny_models import TINY
from graft.training.adapters.build import attach, lr_scales, restore_adapters, select
from graft.training.comfy.files.trained_lora import with_lora
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.unload import unload
from graft.training.comfy.run.notes import family_in, model_file, run_notes
from graft.training.config import (
    AdapterConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from graft.training.data import DatasetConfig
from graft.training.data.caption import variations
from graft.training.family import is_text
from graft.training.files.lora.diffusers import diffusers_tensors
from graft.training.files.lora.write import lora_tensors
from graft.training.loop import initial_state, train
from graft.training.memory.estimate import estimate_step
from graft.training.run.saved_state import load_state, save_state
from graft.training.validation import validation_loss

CAPTIONS = ("a red square", "a blue square, (bright:1.3)", "a green ball")
every = pytest.mark.parametrize("name", ENCODERS)


def encoded(clip, caption):
    [[cross, extra]] = clip.encode_from_tokens_scheduled(clip.tokenize(caption))
    kept = {key: value for key, value in extra.items() if isinstance(value, torch.Tensor)}
    return {"cross_attn": cross, **kept}


class Captioned:
    """Images of a tiny family with captions, and what the base's CLIP makes of them."""

    fingerprint = "captioned"
    is_captioned = True

    def __init__(self, tiny, clip, tail=0):
        with torch.no_grad():
            self.texts = [encoded(clip, caption) for caption in CAPTIONS]
        for text in self.texts if tail else ():
            more = torch.randn(
                1, tail, text["cross_attn"].shape[2], generator=torch.Generator().manual_seed(1)
            )
            text["cross_attn"] = torch.cat((text["cross_attn"], more), 1)
        self.tiny = tiny

    def __len__(self):
        return len(CAPTIONS)

    def sample(self, index):
        return self.batch(1, seed=0, index=index)

    def batch(self, size, *, seed, index):
        chosen = [(index * size + i) % len(CAPTIONS) for i in range(size)]
        batch = self.tiny.batch(chosen)
        texts, captions = [self.texts[i] for i in chosen], [CAPTIONS[i] for i in chosen]
        return dataclasses.replace(batch, conditioning=texts, captions=captions)


@pytest.fixture(scope="module")
def trained():
    """name -> (patcher, clip, denoiser, dataset, state after 2 steps), each trained once."""
    cache = {}

    def of(name):
        if name not in cache:
            patcher, clip = tiny(name)(), clip_of(name)
            denoiser, dataset = ComfyDenoiser(patcher, clip), Captioned(tiny(name), clip)
            cache[name] = (patcher, clip, denoiser, dataset, train(denoiser, dataset, CONFIG, None, steps=2))
        return cache[name]

    return of


def snapshot(clip):
    modules = {path: sorted(vars(module)) for path, module in clip.cond_stage_model.named_modules()}
    return {name: t.clone() for name, t in clip.cond_stage_model.state_dict().items()}, modules


def predicted(denoiser, batch, state=None):
    x, sigma = noisy(denoiser, batch)
    with torch.no_grad(), denoiser.hold(torch.float32) as base:
        adapters = {}
        if state is not None:
            adapters = restore_adapters(denoiser.specs, state.adapter, state.weights, denoiser.device)
        with attach(base.layers, adapters):
            return denoiser.denoise(x, sigma, batch)


def noisy(denoiser, batch):
    x = denoiser.scale_latents(batch.latents).to(denoiser.device)
    return x, torch.tensor([0.4, 0.7], device=denoiser.device)


@every
def test_a_fresh_lora_changes_nothing_and_live_captions_are_the_cached_ones(name, trained):
    patcher, clip, denoiser, dataset, _ = trained(name)
    batch = dataset.batch(2, seed=0, index=0)
    fresh = predicted(denoiser, batch, initial_state(denoiser, CONFIG))
    assert torch.equal(fresh, predicted(denoiser, batch))
    torch.testing.assert_close(fresh, predicted(ComfyDenoiser(patcher), batch), rtol=1e-5, atol=1e-5)


@every
def test_every_parameter_of_every_encoder_has_a_gradient_by_step_two(name, trained):
    _, clip, denoiser, _, state = trained(name)
    start = initial_state(denoiser, CONFIG).weights
    text = {key for key in state.weights if is_text(key)}
    assert {key.split(".")[1] for key in text} == set(WIDTHS[name])
    assert not [key for key in text if torch.equal(state.weights[key], start[key])]


def test_what_the_text_encoders_learn_counts_on_held_out_images(trained):
    _, _, denoiser, dataset, state = trained("sdxl")
    start = initial_state(denoiser, CONFIG).weights
    text = {key: weight if is_text(key) else start[key] for key, weight in state.weights.items()}
    learned = validation_loss(denoiser, dataset, state=dataclasses.replace(state, weights=text))
    assert learned != pytest.approx(validation_loss(denoiser, dataset), rel=1e-6)


@every
def test_text_encoders_and_base_are_byte_identical_afterwards_also_after_an_error(name):
    patcher, clip = tiny(name)(), clip_of(name)
    denoiser, dataset = ComfyDenoiser(patcher, clip), Captioned(tiny(name), clip)
    unload(clip.patcher)
    weights, modules = snapshot(clip)
    train(denoiser, dataset, CONFIG, None, steps=1)
    with contextlib.suppress(KeyError), denoiser.hold(torch.float32):
        raise KeyError
    after, modules_after = snapshot(clip)
    assert modules_after == modules and all(torch.equal(after[key], t) for key, t in weights.items())


@pytest.mark.feature(35)
@every
def test_the_saved_file_through_the_stock_loader_is_the_attached_adapter(name, trained, caplog):
    patcher, clip, denoiser, dataset, state = trained(name)
    batch = dataset.batch(2, seed=0, index=0)
    plain, attached = predicted(denoiser, batch), predicted(denoiser, batch, state)
    with caplog.at_level(logging.WARNING):
        loaded, loaded_clip = comfy.sd.load_lora_for_models(
            patcher, clip, lora_tensors(state, denoiser.family), 1.0, 1.0
        )
    assert not [record.message for record in caplog.records if "not loaded" in record.message.lower()]
    with torch.no_grad():
        texts = [encoded(loaded_clip, caption) for caption in batch.captions]
        comfy.model_management.load_models_gpu([loaded])
        sampled = ComfyDenoiser(loaded)
        stock = sampled.denoise(*noisy(sampled, batch), dataclasses.replace(batch, conditioning=texts))
        comfy.model_management.unload_all_models()
    difference = (stock - plain) - (attached - plain)
    assert difference.norm() <= 1e-4 * (attached - plain).norm()


@every
def test_a_run_saved_and_resumed_is_bit_equal(name, trained, tmp_path):
    _, _, denoiser, dataset, whole = trained(name)
    half = train(denoiser, dataset, CONFIG, None, steps=1)
    save_state(half, tmp_path / "half")
    again = train(denoiser, dataset, CONFIG, load_state(tmp_path / "half"), steps=1)
    assert again.losses == whole.losses
    assert all(torch.equal(again.weights[key], tensor) for key, tensor in whole.weights.items())


@every
def test_a_training_after_sampling_with_its_lora_starts_from_the_base_again(name, trained):
    """For sampling ComfyUI merges the LoRA into the encoders, even if they are on the CPU beside a card."""
    patcher, clip, denoiser, dataset, state = trained(name)
    _, patched = with_lora(patcher, clip, state, denoiser.family)
    with torch.no_grad():
        encoded(patched, CAPTIONS[0])
    again = train(ComfyDenoiser(patcher, clip), dataset, CONFIG, None, steps=1)
    assert again.losses == state.losses[:1] and again.base == state.base


@every
def test_the_lora_leaves_as_clip(name, trained):
    patcher, clip, denoiser, _, state = trained(name)
    _, patched = with_lora(patcher, clip, state, denoiser.family)
    with torch.no_grad():
        assert not torch.equal(*(encoded(c, CAPTIONS[0])["cross_attn"] for c in (clip, patched)))


@pytest.mark.parametrize(
    "name, prefixes",
    [("sd15", {"lora_te"}), ("sdxl", {"lora_te1", "lora_te2"}), ("sd35m", {"lora_te1", "lora_te2"})],
)
def test_files_name_the_encoders_as_sd_scripts_does(name, prefixes, trained):
    _, _, denoiser, _, state = trained(name)
    keys = [key for key in lora_tensors(state, denoiser.family) if not key.startswith("lora_unet_")]
    assert {key.split("_text_model_encoder_layers_")[0] for key in keys} == prefixes
    assert any(key.endswith("_text_model_encoder_layers_0_self_attn_q_proj.alpha") for key in keys)


@pytest.mark.parametrize("name", ["sdxl", "sd35m"])
def test_exports_name_the_encoders_as_diffusers_does(name, trained):
    _, _, denoiser, _, state = trained(name)
    keys = diffusers_tensors(state, denoiser.family, torch.float32)
    for part in ("text_encoder", "text_encoder_2"):
        assert f"{part}.text_model.encoder.layers.0.mlp.fc1.lora_A.weight" in keys


def test_layers_that_the_network_does_not_see_are_not_trained(trained):
    """SDXL takes CLIP-L's layer before the last, and no pooled output of it."""
    specs = trained("sdxl")[2].specs
    assert "text_encoders.clip_l.transformer.text_model.encoder.layers.2.mlp.fc1" not in specs
    assert "text_encoders.clip_g.transformer.text_model.encoder.layers.2.mlp.fc1" in specs


def test_clip_skip_counts():
    clip = clip_of("sd15").clone()
    clip.layer_idx = -2
    denoiser = ComfyDenoiser(tiny("sd15")(), clip)
    found = {path.split(".layers.")[1][0] for path in denoiser.specs if is_text(path)}
    assert found == {"0", "1"}


def test_what_follows_the_clip_tokens_stays_as_cached():
    """T5's tokens come behind CLIP's, and T5 is not trained."""
    clip = clip_of("sd35m")
    denoiser = ComfyDenoiser(tiny("sd35m")(), clip)
    batch = Captioned(tiny("sd35m"), clip, tail=5).batch(2, seed=0, index=0)
    with torch.no_grad(), denoiser.hold(torch.float32):
        made = denoiser.text.encode(batch.captions[0], batch.conditioning[0])
    assert torch.equal(made["cross_attn"][:, -5:], batch.conditioning[0]["cross_attn"][:, -5:])
    torch.testing.assert_close(made["cross_attn"], batch.conditioning[0]["cross_attn"])


def test_the_text_encoders_have_their_own_share_of_the_learning_rate(trained):
    _, _, denoiser, _, state = trained("sdxl")
    adapters = restore_adapters(denoiser.specs, state.adapter, state.weights, denoiser.device)
    scales = lr_scales(adapters, state.adapter)
    assert {scale for name, scale in scales.items() if is_text(name)} == {0.5}
    assert {scale for name, scale in scales.items() if not is_text(name)} == {1.0}


def test_off_by_default_and_nothing_of_the_encoders_is_touched():
    clip = clip_of("sd15")
    config = dataclasses.replace(CONFIG, adapter=AdapterConfig(rank=4))
    state = initial_state(ComfyDenoiser(tiny("sd15")(), clip), config)
    assert not [name for name in state.weights if is_text(name)]


def test_a_family_without_clip_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="Lumina 2 has no CLIP text encoder to train; set text_encoder to 0"):
        ComfyDenoiser(TINY["lumina2"](), clip_of("sd15"))


def test_memory_plan_counts_the_text_encoders_part(trained):
    patcher, clip, _, dataset, _ = trained("sd15")
    dataset.largest_batch = lambda size: dataset.batch(size, seed=0, index=0)

    def adapters(config, **given):
        table = MemoryPlan.execute(patcher, dataset, config, 1, **given).result[0]
        return float(table.splitlines()[1].split("MiB")[1])

    without = dataclasses.replace(CONFIG.adapter, text_encoder=0.0)
    assert adapters(CONFIG.adapter, clip=clip) > adapters(without)
    with pytest.raises(ValueError, match="clip: missing"):
        MemoryPlan.execute(patcher, dataset, CONFIG.adapter, 1)


@every
@pytest.mark.parametrize("mode", ["none", "block"])
def test_what_training_the_text_encoders_takes_is_estimated(name, mode):
    clip = clip_of(name)
    denoiser = ComfyDenoiser(tiny(name)(), clip)
    batch = Captioned(tiny(name), clip).batch(2, seed=0, index=0)
    adapted = select(denoiser.specs, denoiser.family, CONFIG.adapter)
    estimate, without = (
        estimate_step(denoiser, adapted, CONFIG.adapter, each, mode, torch.float32)
        for each in (batch, dataclasses.replace(batch, captions=()))
    )
    assert estimate.saved > without.saved
    if not PRETENDED:  # there a view counts like a copy
        live, saved = measured(denoiser, batch, CONFIG, mode)
        assert abs(estimate.saved / saved - 1) <= 0.1 and abs(estimate.peak / live.peak - 1) <= 0.1


def test_train_steps_asks_for_the_clip_it_needs():
    encoded_dataset = SimpleNamespace(largest_batch=None, is_captioned=True)
    with pytest.raises(ValueError, match="clip: missing; the LoRA trains the text encoders"):
        TrainSteps.execute(tiny("sd15")(), encoded_dataset, CONFIG.adapter, 1, 0, 1e-4, 1, 0, "x")


def test_the_run_says_that_the_text_cache_is_off(trained):
    denoiser = trained("sd15")[2]
    assert "the text cache is not used" in run_notes(denoiser, CONFIG, denoiser.family, 10)[0]


def test_a_resolution_beyond_the_bases_own_is_a_warning():
    config = dataclasses.replace(CONFIG, adapter=AdapterConfig())
    large, usual = [(832, 1216), (512, 512)], [(768, 768), (512, 768)]

    def notes(name, sizes):
        denoiser = ComfyDenoiser(TINY[name]())
        return run_notes(denoiser, config, denoiser.family, 10, sizes)

    [note] = notes("sd15", large)
    assert "SD1.5 was made for images of about 512 px and is trained at 1006" in note
    assert not notes("sd15", usual) and not notes("sdxl", large)


# Captions are text


@pytest.mark.parametrize(
    "caption",
    ["ganyu (genshin impact), 1girl", "a ((b)), (c:1.3)", ":) and (unclosed", r"escaped \(already\)"],
)
@every
def test_brackets_in_captions_are_letters_for_comfyuis_tokenizers(name, caption):
    tokenizer = ENCODERS[name][1]()
    [text] = variations((caption,), DatasetConfig())
    written = caption.replace("\\(", "(").replace("\\)", ")")
    assert tokenizer.tokenize_with_weights(text) == tokenizer.tokenize_with_weights(
        written, disable_weights=True
    )


# Distilled bases


def graph(file, *, key="ckpt_name"):
    """A queued graph: a loader, a node in between, Train Steps."""
    return {
        "1": {"class_type": "Loader", "inputs": {key: file, "weight": 1}},
        "2": {"class_type": "Between", "inputs": {"model": ["1", 0], "strength": 0.5}},
        "3": {"class_type": "GraftTrainSteps", "inputs": {"model": ["2", 0], "steps": 5}},
    }


@pytest.mark.parametrize("key", ["ckpt_name", "unet_name", "model"])
def test_the_base_models_file_is_found_through_the_graph(key):
    assert model_file(graph("a/sd3.5_large_turbo.safetensors", key=key), "3").endswith("turbo.safetensors")
    assert model_file({}, "3") == model_file(None, None) == ""


@pytest.mark.feature(143)
@pytest.mark.parametrize(
    "name, file, words",
    [("schnell", "", "schnell"), ("sd35l", "sd3.5_large_turbo.safetensors", "turbo")],
)
def test_a_distilled_base_is_a_warning_that_names_the_remedy(name, file, words):
    config = dataclasses.replace(CONFIG, adapter=AdapterConfig())
    denoiser = ComfyDenoiser(TINY[name]())
    [note] = run_notes(denoiser, config, family_in(file, denoiser.patcher), 10)
    assert words in note and "Train on the model it was distilled from" in note and "assistant LoRA" in note
    denoiser = ComfyDenoiser(TINY["sd35l"]())
    plain = family_in("sd3.5_large_turbulence.safetensors", denoiser.patcher)
    assert not run_notes(denoiser, config, plain, 10) and plain.cfg == 4.0


def test_a_run_says_which_settings_do_nothing_in_it():
    denoiser = ComfyDenoiser(TINY["flux"]())
    config = TrainConfig(
        optimizer=OptimizerConfig(name="prodigy", lr=1e-4),
        schedule=ScheduleConfig(warmup_steps=10),
        objective=ObjectiveConfig(shift=3.0, resolution_shift="flux"),
    )
    prodigy, warmup, shift = run_notes(denoiser, config, denoiser.family, 10)
    assert prodigy.startswith("prodigy multiplies") and warmup.startswith("warmup_steps 10 of a run of 10")
    assert shift == "shift 3 has no effect with resolution_shift flux."
