"""Build LoRA and LoRA Settings: the numbers that are shown, and training that goes on from a LoRA file."""

from __future__ import annotations

import json

import comfy.sd
import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.nodes.lora import BuildLora
from graft.nodes.lora_settings import LoraSettings
from graft.tests.support import dynamic_vram
from graft.tests.support.first_lora import first_lora, four_squares
from graft.tests.support.tiny_sd3 import sd3_state_dict
from graft.training.adapters.build import build_adapters, method_of, select
from graft.training.comfy.files.initial_lora import save_initial_state, summary
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.run.notes import run_notes
from graft.training.config import TrainConfig

QKV = "joint_blocks.0.x_block.attn.qkv"


@pytest.fixture(scope="module", autouse=True)
def files(base):
    """A LoRA of diffusers' names with rank 4, one key too many and a text encoder; one of another model."""
    torch.manual_seed(0)
    tensors = {"odd.diff": torch.ones(2, 2)}
    for name, out in ((f"transformer.transformer_blocks.0.attn.to_{part}", 128) for part in "qkv"):
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = (
            torch.randn(4, 128),
            torch.randn(out, 4),
        )
    for part in "kv":
        name = "transformer.transformer_blocks.0.attn.to_"
        tensors[f"{name}{part}.lora_A.weight"] = tensors[f"{name}q.lora_A.weight"].clone()
    tensors["text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_A.weight"] = torch.ones(2, 3)
    tensors["text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_B.weight"] = torch.ones(4, 2)
    (base / "models" / "loras").mkdir(parents=True, exist_ok=True)
    save_file(tensors, base / "models" / "loras" / "begun.safetensors")
    flux = {
        f"lora_unet_double_blocks_0_img_mlp_0.lora_{side}.weight": torch.ones(2, 2) for side in ("up", "down")
    }
    save_file(flux, base / "models" / "loras" / "flux.safetensors")
    four_squares(base)


@pytest.fixture
def model():
    return comfy.sd.load_diffusion_model_state_dict(sd3_state_dict())


def built(**changes):
    settings = {"algorithm": "lora", "rank": 8, "alpha": 0.0, "targets": "attn", **changes}
    output = BuildLora.execute(**settings)
    return output.result[0], output.ui["text"][0] if output.ui else None


@pytest.mark.feature(16)
def test_the_node_shows_layers_and_trained_parameters(model):
    config, text = built(model=model, include="*qkv")
    denoiser = ComfyDenoiser(model)
    chosen = select(denoiser.specs, denoiser.family, config)
    count = sum(8 * (spec.shape[0] + spec.shape[1]) for spec in chosen.values())
    assert text == f"SD3.5 Medium: {len(chosen)} layers, {count / 1e6:.2f} M trained parameters"


@pytest.mark.feature(38)
def test_patterns_that_match_no_layer_are_named(model):
    config, text = built(model=model, exclude="*single_transformer_blocks.0*\n*x_block.attn.proj")
    assert (
        "exclude: '*single_transformer_blocks.0*' matches no layer" in text and text.count("matches no") == 1
    )
    rules = LoraSettings.execute(config, learning_rates="*nowhere* = 0.5", ranks="*attn* = 4").result[0]
    denoiser = ComfyDenoiser(model)
    notes = run_notes(denoiser, TrainConfig(adapter=rules), denoiser.family, 10)
    assert [note.split(" matches")[0] for note in notes] == [
        "exclude: '*single_transformer_blocks.0*'", "learning rates: '*nowhere*'",
    ]  # fmt: skip


def test_pissa_counts_what_is_trained_and_not_its_start(model):
    config, _ = built(model=model)
    pissa = LoraSettings.execute(config, init="pissa").result[0]
    denoiser = ComfyDenoiser(model)
    adapters = build_adapters(select(denoiser.specs, denoiser.family, pissa), pissa).values()
    trained = sum(p.numel() for a in adapters for p in a.parameters() if p.requires_grad)
    assert f"{trained / 1e6:.2f} M trained" in summary(denoiser, pissa) == summary(denoiser, config)


def test_the_node_lists_what_of_the_file_fits_nothing(model):
    _, text = built(model=model, start_from="begun.safetensors", include=QKV)
    assert "1 layers start from begun.safetensors, 0 fresh\nlora, rank 4, alpha 4\n" in text
    assert "3 keys match nothing and were left out" in text
    for key in ("odd.diff", "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_up.weight"):
        assert f"\n  {key}" in text


@dynamic_vram.is_off("it merges nothing into the weights in memory")
@pytest.mark.parametrize(("size", "rank"), [("as in the file", 4), ("as set here", 8)])
def test_step_0_computes_what_the_stock_loader_makes_of_the_file(model, base, size, rank):
    config, _ = built(start_from="begun.safetensors", start_size=size)
    denoiser = ComfyDenoiser(model)
    handle, left_out = save_initial_state(denoiser, config, seed=0)
    state = handle.load()
    assert state.adapter.rank == rank and state.weights[f"{QKV}.down"].shape == (rank, 128)
    strength = method_of(state.adapter).effective_alpha(state.adapter) / rank
    product = strength * state.weights[f"{QKV}.up"] @ state.weights[f"{QKV}.down"]
    tensors = load_file(base / "models" / "loras" / "begun.safetensors")
    patched = comfy.sd.load_lora_for_models(model, None, tensors, 1.0, 1.0)[0]
    key = f"diffusion_model.{QKV}.weight"
    before = model.model.state_dict()[key].clone()
    patched.patch_model(torch.device("cpu"))
    moved = patched.model.state_dict()[key] - before
    patched.unpatch_model(torch.device("cpu"))
    assert torch.allclose(product, moved, atol=1e-4) and "  odd.diff" in left_out
    assert len(state.weights) == 2 * len(select(denoiser.specs, denoiser.family, config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_size": "as set here", "rank": 2}, "the file has rank 4 here and the settings have 2"),
        ({"start_size": "as set here", "algorithm": "loha"}, "the file holds lora weights"),
        ({"start_from": "flux.safetensors"}, "flux.safetensors: no layer of SD3.5 Medium has a name"),
        ({"start_from": "nowhere.safetensors"}, "no such file in models/loras"),
    ],
)
def test_a_file_that_cannot_be_brought_to_the_settings_is_refused(model, changes, message):
    config, _ = built(**{"start_from": "begun.safetensors", **changes})
    with pytest.raises(ValueError, match=message):
        save_initial_state(ComfyDenoiser(model), config, seed=0)


def test_a_plain_lora_goes_on_as_dora(model):
    config, _ = built(start_from="begun.safetensors", start_size="as set here", algorithm="dora")
    state = save_initial_state(ComfyDenoiser(model), config, seed=0)[0].load()
    assert state.weights[f"{QKV}.magnitude"].shape == (1, 128)


@pytest.mark.feature(20)
def test_training_goes_on_from_a_saved_lora_in_a_graph(execute, base):
    prompt = {key: node for key, node in first_lora("begin", steps=1).items() if int(key) <= 6}
    build, train, save = (
        next(key for key, node in prompt.items() if node["class_type"] == kind)
        for kind in ("GraftBuildLora", "GraftTrainSteps", "GraftSaveLora")
    )
    prompt[save]["inputs"] |= {"name": "begin", "dtype": "fp32"}
    execute(prompt)
    (base / "models" / "loras" / "begin.safetensors").write_bytes(
        (base / "output" / "loras" / "begin.safetensors").read_bytes()
    )
    prompt[build]["inputs"] |= {"start_from": "begin.safetensors", "rank": 99}
    prompt[train]["inputs"] |= {"name": "go on", "learning_rate": 1e-9}
    prompt[save]["inputs"] |= {"name": "go on"}
    execute(prompt)
    first, second = (
        load_file(base / "output" / "loras" / f"{name}.safetensors") for name in ("begin", "go on")
    )
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[key], second[key], atol=1e-6) for key in first)


@pytest.mark.feature(25)
def test_a_preset_of_lycoris_chooses_layers_and_algorithms(model):
    config, _ = built()
    preset = {
        "use_fnmatch": True,
        "enable_conv": False,
        "unet_target_name": [QKV],
        "name_algo_map": {QKV: {"dim": 2}},
    }
    changed = LoraSettings.execute(config, preset=json.dumps(preset)).result[0]
    denoiser = ComfyDenoiser(model)
    chosen = select(denoiser.specs, denoiser.family, changed)
    assert list(chosen) == [QKV] and build_adapters(chosen, changed)[QKV].config.rank == 2


@pytest.mark.parametrize("name", ["include", "start_size"])
def test_rarely_needed_inputs_are_marked_advanced(graft_nodes, name):
    assert graft_nodes["GraftBuildLora"].INPUT_TYPES()["optional"][name][1]["advanced"] is True
