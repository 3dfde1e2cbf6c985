"""Samples while training, in ComfyUI's own executor: they show what is learned and change nothing in it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import shutil
import types

import comfy.model_management
import comfy.sample
import comfy.sd
import comfy.utils
import folder_paths
import pytest
import torch
from comfy.taesd.taesd import TAESD
from PIL import Image

from graft.nodes import sample_prompts
from graft.starter import in_comfyui as embedded
from graft.tests.support.first_lora import assert_same_lora, first_lora, four_squares, lora, sampled
from graft.training.comfy.run import checkpoint_grid as grid
from graft.training.comfy.run import samples as samples_module
from graft.training.comfy.run.notes import family_in
from graft.training.family import family_of

from ..support.tiny_models import TINY


@pytest.fixture(scope="module", autouse=True)
def images(base):
    four_squares(base)


def plain(name, **train):
    prompt = first_lora(name, steps=4, **train)
    prompt["2"]["inputs"]["trigger"] = "sks"
    return prompt


def assert_as_without_samples(execute, base, name):
    execute(plain("without_samples"))
    assert_same_lora(base, name, "without_samples")


def folder_of(base, name):
    return next((base / "output" / "graft").glob(f"{name}-*"))


def drawn(base, name):
    return {path.name: path for path in sorted((folder_of(base, name) / "samples").glob("*"))}


@pytest.mark.feature(92)
def test_samples_are_saved_with_the_workflow_and_the_state_is_bit_equal_without_them(execute, base):
    execute(sampled("with_samples"))
    assert_as_without_samples(execute, base, "with_samples")
    found = drawn(base, "with_samples")
    assert list(found) == [f"step-{step:08d}-{number}.png" for step in (0, 2, 4) for number in (0, 1)]
    with Image.open(found["step-00000004-0.png"]) as image:
        assert image.size == (64, 96) and image.text["graft_prompt"] == "a [trigger] square"
        assert json.loads(image.text["prompt"])["5"]["class_type"] == "GraftTrainSteps"


@pytest.mark.feature(49)
def test_samples_show_the_lora_of_their_step_and_the_trigger(base):
    found = {name: Image.open(path).tobytes() for name, path in drawn(base, "with_samples").items()}
    assert found["step-00000000-0.png"] != found["step-00000004-0.png"]
    assert found["step-00000004-0.png"] != found["step-00000004-1.png"]


def test_brackets_of_the_trigger_are_letters_in_a_prompt_and_those_of_the_prompt_weights(monkeypatch):
    drawn = []
    monkeypatch.setattr(samples_module, "with_lora", lambda model, clip, *_: (model, clip))
    monkeypatch.setattr(samples_module, "_draw_prompt", lambda *arguments: drawn.append(arguments[3].text))
    plan = samples_module.SamplePrompts("clip", "vae", ("(happy:1.2) [trigger]",))
    family = types.SimpleNamespace(bucket_step=16, cfg=4.0)
    list(samples_module.draw_samples(plan, None, types.SimpleNamespace(step=0), family, "ganyu (genshin)"))
    assert drawn == [r"(happy:1.2) ganyu \(genshin\)"]


@pytest.mark.parametrize(
    ("layer", "times"), [("blocks.0.lora_down", 3), ("text_encoders.clip_l.lora_down", 9)]
)
def test_a_text_is_encoded_once_for_all_sets_unless_the_lora_changes_it(monkeypatch, layer, times):
    """Three sets of two prompts, and the negative one of both."""
    asked, texts = [], ("a square", "a circle", "blurry")
    monkeypatch.setattr(samples_module, "with_lora", lambda model, clip, *_: (model, clip))
    monkeypatch.setattr(
        samples_module, "encode_edit", lambda clip, vae, text, *_: asked.append(text) or f"{text}, encoded"
    )

    def draw(settings, model, clip, prompt, *_):
        return [prompt.encode(settings, clip, text, (64, 64)) for text in (prompt.text, settings.negative)]

    monkeypatch.setattr(samples_module, "_sample", draw)
    plan = samples_module.SamplePrompts("clip", "vae", texts[:2], negative=texts[2])
    family, known = family_of("Flux"), {}
    for step in (0, 2, 4):
        state = types.SimpleNamespace(step=step, weights={layer: None})
        drawn = list(samples_module.draw_samples(plan, None, state, family, encoded=known))
        assert drawn == [[f"{text}, encoded", "blurry, encoded"] for text in texts[:2]]
    assert len(asked) == times and set(asked) == set(texts)


@pytest.mark.feature(119)
def test_samples_are_shown_on_the_node(execute, monkeypatch):
    shown = []

    def hook(value, total, preview, node_id=None, **_):
        if preview is not None and node_id == "5":
            shown.append((value, total, preview[0], preview[1].size))

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    execute(sampled("shown", prompts="a square"))
    assert shown == [(step, 4, "JPEG", (64, 96)) for step in (0, 2, 4)]


def test_an_error_in_the_sampler_costs_the_pictures_and_not_the_run(execute, base, monkeypatch, caplog):
    def broken(model, *args, **options):
        raise ValueError("no such sampler")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(samples_module, "_sample", broken)
        execute(sampled("broken_sampler"))
    assert "no samples of step 2" in caplog.text and not drawn(base, "broken_sampler")
    assert_as_without_samples(execute, base, "broken_sampler")


@pytest.mark.parametrize(("fits", "sizes"), [(32 * 48, {(32, 48)}), (0, set())])
def test_memory_that_runs_out_costs_size_and_then_the_picture(
    execute, base, monkeypatch, caplog, fits, sizes
):
    draw = samples_module._sample

    def small(plan, model, clip, prompt, seed, width, height):
        if width * height > fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return draw(plan, model, clip, prompt, seed, width, height)

    name = f"out_of_memory_{fits}"
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(samples_module, "_sample", small)
        execute(sampled(name))
    assert {Image.open(path).size for path in drawn(base, name).values()} == sizes
    assert "memory ran out for the sample 'a sks square' at 64x96" in caplog.text
    assert_as_without_samples(execute, base, name)


def test_a_decoder_without_room_decodes_in_tiles(execute, base, monkeypatch):
    tiled = []
    decode, decode_tiled = TAESD.decode, comfy.sd.VAE.decode_tiled_

    def no_room(self, *args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def counted(self, *args, **options):
        tiled.append(1)
        with monkeypatch.context() as patch:
            patch.setattr(type(self.first_stage_model), "decode", decode)
            return decode_tiled(self, *args, **options)

    prompt = sampled("tiles", every=4, before_training=False, prompts="a square")
    with monkeypatch.context() as patch:
        patch.setattr(TAESD, "decode", no_room)
        patch.setattr(comfy.sd.VAE, "decode_tiled_", counted)
        execute({key: node for key, node in prompt.items() if key not in ("9", "10", "11", "12")})
    assert tiled and [Image.open(path).size for path in drawn(base, "tiles").values()] == [(64, 96)]


def test_cancel_inside_the_sampler_keeps_the_step_and_the_samples_are_made_up_for(execute, base, monkeypatch):
    calls = []
    sample = comfy.sample.sample

    def cancelled(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise comfy.model_management.InterruptProcessingException
        return sample(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(comfy.sample, "sample", cancelled)
        execute(sampled("cancelled_samples", before_training=False))
    checkpoints = (folder_of(base, "cancelled_samples") / "checkpoints").iterdir()
    assert [path.name for path in checkpoints] == ["step-00000002"]
    for path in drawn(base, "cancelled_samples").values():
        path.unlink()
    execute(sampled("cancelled_samples", before_training=False))
    assert_as_without_samples(execute, base, "cancelled_samples")
    assert len(drawn(base, "cancelled_samples")) == 4


def interrupted_at(patch, picture):
    """Have the drawing of this picture, counted from 1, end the run, as a kill does."""
    calls = []
    sample = comfy.sample.sample

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == picture:
            raise comfy.model_management.InterruptProcessingException
        return sample(*args, **options)

    patch.setattr(comfy.sample, "sample", interrupted)


@pytest.mark.parametrize("picture", [2, 3, 6])
def test_pictures_that_a_kill_prevented_are_drawn_by_the_next_run(execute, base, monkeypatch, picture):
    """Before the second picture of the set at step 0, the first at step 2, the last at step 4."""
    name = f"killed_{picture}"
    with monkeypatch.context() as patch:
        interrupted_at(patch, picture)
        execute(sampled(name))
    assert len(drawn(base, name)) == picture - 1
    execute(sampled(name))
    assert_as_without_samples(execute, base, name)
    execute(sampled("undisturbed"))
    pictures, undisturbed = (
        {file: Image.open(path).tobytes() for file, path in drawn(base, run).items()}
        for run in (name, "undisturbed")
    )
    assert pictures == undisturbed and len(pictures) == 6


def test_pictures_are_drawn_while_their_state_is_there_and_otherwise_said_to_be_lost(execute, base, caplog):
    prompt = sampled("gaps", every=1)
    prompt["5"]["inputs"]["checkpoint_settings"] = ["50", 0]
    settings = {"minutes": 0.0, "steps": 0, "keep": 9, "tensorboard": False, "lora": False}
    prompt["50"] = {"class_type": "GraftCheckpointSettings", "inputs": settings}
    execute(prompt)
    checkpoints, names = folder_of(base, "gaps") / "checkpoints", set(drawn(base, "gaps"))
    for path in drawn(base, "gaps").values():
        path.unlink()
    shutil.rmtree(checkpoints / "step-00000001")
    (checkpoints / "step-00000003" / "state.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        execute(sampled("gaps", every=1, negative="a circle"))  # so that ComfyUI runs the node again
    gone = {f"step-{step:08d}-{number}.png" for step in (1, 3) for number in (0, 1)}
    assert set(drawn(base, "gaps")) == names - gone and len(names) == 10
    assert "samples of step 1, 3 are missing and cannot be drawn" in caplog.text


class EncodesByLength:
    """Stands for a CLIP."""

    def tokenize(self, text):
        return text

    def encode_from_tokens_scheduled(self, tokens):
        return [[torch.full((1, 4, 32), float(len(tokens))), {"pooled_output": torch.zeros(1, 32)}]]


def conditionings(monkeypatch, **values):
    """What the sampler is given for the prompt "a cat" and for the negative one."""
    caught = []

    def caught_instead(model, noise, steps, cfg, sampler, scheduler, positive, negative, latent, **options):
        caught.extend((positive, negative))
        raise KeyboardInterrupt

    vae = types.SimpleNamespace(spacial_compression_encode=lambda: 8)
    plan = samples_module.SamplePrompts(EncodesByLength(), vae, ("a cat",), **values)
    monkeypatch.setattr(comfy.sample, "sample", caught_instead)
    with pytest.raises(KeyboardInterrupt):
        prompt = samples_module.Prompt("a cat", [], family_of("Flux"))
        samples_module._sample(plan, TINY["flux"](), plan.clip, prompt, 0, 64, 64)
    return caught


def test_guidance_is_set_as_the_flux_guidance_node_sets_it(monkeypatch):
    from comfy_extras.nodes_flux import FluxGuidance

    plain = [EncodesByLength().encode_from_tokens_scheduled(text) for text in ("a cat", "")]
    guided = [FluxGuidance.execute(conditioning, 2.5).args[0] for conditioning in plain]
    assert str(conditionings(monkeypatch)) == str(plain)
    assert str(conditionings(monkeypatch, guidance=2.5)) == str(guided) != str(plain)
    with pytest.raises(ValueError, match="guidance must be 0 or more"):
        conditionings(monkeypatch, guidance=-0.5)


def test_what_is_without_effect_is_said_once_a_run_in_the_log_and_on_the_node(execute, caplog):
    values = {"guidance": 3.0, "negative": "a circle", "cfg": 1.0, "prompts": "a square"}
    with caplog.at_level(logging.WARNING):
        executor = execute(sampled("guided", every=1, **values))
    [shown] = executor.history_result["outputs"]["5"]["text"]
    for text in (caplog.text, shown):
        assert text.count("guidance 3 of Sample Prompts: SD3.5 Large has no") == 1
        assert text.count("the negative prompt of Sample Prompts has no effect at cfg 1") == 1


@pytest.mark.feature(93)
@pytest.mark.parametrize(
    "model, file, cfg",
    [("flux", "", 1.0), ("schnell", "", 1.0), ("sd35l", "sd3.5_large_turbo.safetensors", 1.0)]
    + [(name, "", 4.0) for name in ("sdxl", "sd35l", "chroma")],
)
def test_the_guidance_scale_is_the_models_unless_one_is_set(monkeypatch, model, file, cfg):
    drawn = []
    plan = samples_module.SamplePrompts("clip", "vae", ("a cat",), negative="a dog")
    family = family_in(file, TINY[model]())
    monkeypatch.setattr(samples_module, "with_lora", lambda model, clip, *_: (model, clip))
    monkeypatch.setattr(samples_module, "_sample", lambda plan, *_: drawn.append(plan.cfg))
    for given in (plan, dataclasses.replace(plan, cfg=3.0)):
        list(samples_module.draw_samples(given, None, None, family))
    assert drawn == [cfg, 3.0]
    without_effect = "the negative prompt of Sample Prompts has no effect at cfg 1."
    assert plan.notes(family) == ([without_effect] if cfg == 1 else [])
    burnt = dataclasses.replace(plan, cfg=3.0).notes(family)
    assert ["is distilled for cfg 1" in note for note in burnt] == ([True] if cfg == 1 else [])


def test_the_grid_is_drawn_at_the_guidance_scale_of_the_file_it_comes_from(execute, base, monkeypatch):
    drawn = []
    monkeypatch.setattr(grid, "draw_samples", lambda plan, *_, **__: iter([drawn.append(plan.cfg)]))
    tiny = folder_paths.get_full_path_or_raise("checkpoints", "graft_tiny_sd3.safetensors")
    shutil.copy(tiny, base / "models" / "checkpoints" / "tiny_turbo.safetensors")
    prompt = sampled("turbo_grid", every=0, cfg=0.0, prompts="a square")
    prompt["1"]["inputs"] |= {"model": "tiny_turbo.safetensors", "text_encoder_1": embedded.TEXT_ENCODER}
    values = {"strengths": "1", "checkpoints": 1, "trigger": ""}
    links = {"model": ["1", 0], "state": ["5", 2], "sample_prompts": ["40", 0]}
    prompt["51"] = {"class_type": "GraftCheckpointGrid", "inputs": {**links, **values}}
    prompt["52"] = {"class_type": "PreviewImage", "inputs": {"images": ["51", 0]}}
    execute(prompt)
    assert drawn == [1.0]


@pytest.mark.feature(159)
def test_samples_are_drawn_with_another_model_and_the_lora_and_the_run_is_the_same(execute, base):
    prompt = sampled("drawn_by_another", prompts="a square")
    prompt["60"] = {"class_type": "ModelSamplingSD3", "inputs": {"model": ["1", 0], "shift": 9.0}}
    prompt["40"]["inputs"]["model"] = ["60", 0]
    execute(prompt)
    assert_as_without_samples(execute, base, "drawn_by_another")
    execute(sampled("drawn_by_itself", prompts="a square"))
    other, itself = (
        {file: Image.open(path).tobytes() for file, path in drawn(base, run).items()}
        for run in ("drawn_by_another", "drawn_by_itself")
    )
    assert len(set(other.values()) | set(itself.values())) == 6  # of three sets each
    keys = {folder_of(base, run).name.rpartition("-")[2] for run in ("drawn_by_another", "drawn_by_itself")}
    assert len(keys) == 1


def test_a_turbo_model_that_draws_has_its_own_guidance_scale(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        samples_module, "with_lora", lambda model, clip, *_: drawn.append(model) or (model, clip)
    )
    monkeypatch.setattr(samples_module, "_sample", lambda plan, *_: drawn.append(plan.cfg))
    base, turbo = TINY["zimage"](), TINY["zimage"](seed=1)
    plan = samples_module.SamplePrompts("clip", "vae", ("a",), model=turbo, model_file="z_image_turbo.sft")
    list(
        samples_module.draw_samples(plan, base, types.SimpleNamespace(step=0), family_in("z_image.sft", base))
    )
    assert drawn == [turbo, 1.0]


def test_a_model_without_the_trained_layers_is_refused_before_the_first_step(execute, base, monkeypatch):
    prompts = samples_module.SamplePrompts
    with monkeypatch.context() as patch:
        patch.setattr(
            sample_prompts, "SamplePrompts", lambda *a, **k: prompts(*a, **{**k, "model": TINY["flux"]()})
        )
        with pytest.raises(RuntimeError, match="this Flux.1 Dev lacks the layer .* trained on SD3.5 Large"):
            execute(sampled("drawn_by_flux"))
    assert not list((base / "output" / "graft").glob("drawn_by_flux-*"))


def saved(base, name):
    (path,) = (base / "output" / "graft").glob(f"{name}_*.png")
    return Image.open(path)


@pytest.mark.feature(136)
def test_loss_plot_and_checkpoint_grid_are_pictures_of_the_run(execute, base):
    prompt = sampled("compared", every=0)
    prompt["5"]["inputs"]["checkpoint_settings"] = ["50", 0]
    prompt["50"] = {
        "class_type": "GraftCheckpointSettings",
        "inputs": {"minutes": 0.0, "steps": 0, "keep": 9, "tensorboard": False, "lora": False},
    }
    given = {"model": ["1", 0], "state": ["5", 2], "sample_prompts": ["40", 0]}
    for key, name, strengths in (("51", "one", "1"), ("52", "two", "0, 1.0")):
        values = {"strengths": strengths, "checkpoints": 3, "trigger": "sks"}
        prompt[key] = {"class_type": "GraftCheckpointGrid", "inputs": {**given, **values}}
        prompt[f"{key}0"] = {
            "class_type": "SaveImage",
            "inputs": {"images": [key, 0], "filename_prefix": f"graft/grid_{name}"},
        }
    prompt["53"] = {"class_type": "GraftLossPlot", "inputs": {"state": ["5", 2]}}
    prompt["530"] = {
        "class_type": "SaveImage",
        "inputs": {"images": ["53", 0], "filename_prefix": "graft/loss_plot"},
    }
    execute(prompt)
    one, two = saved(base, "grid_one"), saved(base, "grid_two")
    assert two.height - one.height == 3 * (96 + 10) and one.width == two.width
    assert len(saved(base, "loss_plot").getcolors(1 << 24)) > 10
    assert not drawn(base, "compared")


def test_strengths_are_numbers_with_commas():
    assert grid.parse_strengths("0.5, 1") == (0.5, 1.0)
    for text in ("", "much", "1; 2", "nan", "11"):
        with pytest.raises(ValueError, match="strengths"):
            grid.parse_strengths(text)


def test_checkpoints_are_evenly_spread_and_the_last_is_among_them():
    assert grid.spread_evenly(list(range(1, 8)), 3) == [2, 4, 7]
    assert grid.spread_evenly([1, 2], 6) == [1, 2]


@pytest.mark.feature(141)
def test_the_stock_loss_graph_draws_the_loss_map(execute, base, comfyui, graft_nodes):
    import nodes

    extras = comfyui / "comfy_extras" / "nodes_train.py"
    asyncio.run(nodes.load_custom_node(str(extras), module_parent="comfy_extras"))
    prompt = plain("plotted")
    prompt["60"] = {"class_type": "LossGraphNode", "inputs": {"loss": ["5", 4], "filename_prefix": "loss"}}
    executor = execute(prompt)
    assert "60" in executor.history_result["outputs"]


def test_a_run_is_continued_from_its_folder(execute, base):
    execute(plain("from_folder"))
    prompt = plain("longer")
    prompt["70"] = {
        "class_type": "GraftLoadTrainingState",
        "inputs": {"name": folder_of(base, "from_folder").name},
    }
    prompt["5"]["inputs"] |= {"start": ["70", 0], "steps": 1}
    execute(prompt)
    whole = plain("at_once_5")
    whole["5"]["inputs"]["steps"] = 5
    execute(whole)
    assert_same_lora(base, "longer", "at_once_5")
    prompt["70"]["inputs"]["name"] = "no such run"
    with pytest.raises(RuntimeError, match="neither a state in .* nor a run with a checkpoint"):
        execute(prompt)


@pytest.mark.parametrize("extra", ["x", [1], 5, None])
def test_what_a_client_sends_along_may_be_anything(execute, base, extra):
    name = f"along_{type(extra).__name__}"
    prompt = sampled(name, every=4, before_training=False, prompts="a square")
    stock = ("9", "10", "11", "12")  # ComfyUI's Save Image takes objects alone
    graph = {key: node for key, node in prompt.items() if key not in stock}
    execute(graph, extra_data={"extra_pnginfo": extra})
    [picture] = drawn(base, name).values()
    with Image.open(picture) as image:
        assert "prompt" in image.text and "workflow" not in image.text
    assert "prompt" in lora(base, name)[1]
