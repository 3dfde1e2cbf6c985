"""A row is a row: a new model or adapter is one row, and the engine has it everywhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.training.adapters.build import ADAPTERS, build_adapters
from graft.training.adapters.preset import apply_preset
from graft.training.config import AdapterConfig
from graft.training.data.latent_file import read_latent_header, read_latents
from graft.training.family import FAMILIES, family_named, family_of, target_presets
from graft.training.files.lora.initial_weights import build_initial_weights, config_from_file, match_layers
from graft.training.files.lora.metadata import lora_metadata
from graft.training.files.lora.read import read_lora
from graft.training.files.lora.write import lora_tensors, write_lora
from graft.training.job.read import compile_job
from graft.training.loop import train
from graft.training.state import TrainState
from graft.training.tools.inspect import inspect
from graft.training.tools.merge import merge_files
from graft.training.tools.resize import resize_file

from .support.adapter_cases import fresh_state, train_config
from .support.lora_files import NAMES, SHAPES, checkpoint, lora_path
from .support.made_up import MODEL, Gained
from .support.tiny import FAMILY, TinyDataset, TinyDenoiser


def graph(tmp_path, model=None, **process):
    """The inputs of the nodes that a job file becomes, by their kind."""
    process |= {"type": "sd_trainer", "datasets": [{"folder_path": "images"}]}
    process["model"] = {"name_or_path": "base.safetensors", **(model or {})}
    job = compile_job({"config": {"name": "mine", "process": [process]}}, tmp_path)
    return {node["class_type"]: node["inputs"] for node in job.prompt.values()}


# A model


@pytest.fixture
def made_up_model(monkeypatch):
    monkeypatch.setitem(FAMILIES, "MadeUp", MODEL)


def test_a_model_is_found_by_its_class_in_comfyui_and_by_its_name(made_up_model):
    assert family_of("MadeUp") is family_named("Made Up") is MODEL
    assert family_of("MadeUp", file="made-up-turbo").cfg == 1.0


def test_the_targets_of_a_model_are_among_those_to_choose_from(made_up_model):
    assert target_presets()[0] == "attn-mlp" and "first half" in target_presets()


def test_a_job_file_names_a_model(made_up_model, tmp_path):
    found = graph(tmp_path, {"arch": "made_up_large"}, sample={"prompts": ["x"], "guidance_scale": 2})
    assert found["GraftObjectiveSettings"]["sigmas"] == "sigmoid"  # a flow by its sigmas
    assert (found["GraftSamplePrompts"]["cfg"], found["GraftSamplePrompts"]["guidance"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("arch", "train", "message"),
    [
        ("made_up", {"timestep_type": "shift"}, "Graft shifts made_up otherwise than ai-toolkit"),
        ("made_up", {"noise_scheduler": "ddpm"}, "is trained by 'flowmatch'"),
        ("unknown", {}, "is not one of .*, made_up, made_up_large"),
    ],
)
def test_a_job_file_is_checked_against_a_models_row(made_up_model, tmp_path, arch, train, message):
    with pytest.raises(ValueError, match=message):
        graph(tmp_path, {"arch": arch}, train=train)


def test_a_lora_file_says_which_model_it_is_for(made_up_model, tmp_path):
    state = TrainState(3, AdapterConfig(), "base", {}, family="Made Up")
    found = lora_metadata(state, family_named(state.family), title="x")
    assert found["modelspec.architecture"] == "made-up-v1/lora"
    assert found["ss_base_model_version"] == "made_up"
    assert found["ss_network_module"] == "networks.lora_made_up"


def test_a_lora_file_without_metadata_is_known_by_its_layers(made_up_model, tmp_path):
    name = "lora_unet_made_up_layers_0_to_q"
    tensors = {f"{name}.lora_up.weight": torch.ones(4, 2), f"{name}.lora_down.weight": torch.ones(2, 4)}
    assert inspect(read_lora(lora_path(tmp_path, tensors))).base == "Made Up (not stated, by its layers)"


def test_a_preset_of_lycoris_names_the_modules_of_a_model(made_up_model):
    preset = '{"unet_target_module": ["MadeUpModule"]}'
    assert apply_preset(preset, AdapterConfig()).include == ("input_blocks.*",)


def test_latent_files_of_a_model_are_read(made_up_model, tmp_path):
    path = tmp_path / "anna_0016x0016_madeup.npz"
    np.savez(path, latents=np.ones((4, 2, 2), np.float32), original_size=np.array((16, 16)))
    assert read_latent_header(path).width == 16
    assert (read_latents(path, (16, 16), (4, 2, 2)) == 1.0).all()


# An adapter


@pytest.fixture
def made_up_adapter(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "gained", Gained)


def trained():
    denoiser, config = (
        TinyDenoiser(),
        train_config(AdapterConfig(algorithm="gained", rank=3, targets="everything")),
    )
    return denoiser, train(denoiser, TinyDataset(), config, fresh_state(denoiser, config), steps=2)


def saved(tmp_path, state):
    path = tmp_path / "gained.safetensors"
    write_lora(path, lora_tensors(state, FAMILY), lora_metadata(state, FAMILY, title="x"))
    return path


def test_an_adapter_trains_is_saved_and_read(made_up_adapter, tmp_path):
    _, state = trained()
    file = read_lora(saved(tmp_path, state))
    layer = file.layers["lora_unet_blocks_0_mlp"]
    assert set(file.methods.values()) == {"gained"} and layer.is_trainable
    assert (layer.rank, float(layer.tensors["alpha"])) == (3, 2.0)
    left, gains, right = (state.weights[f"blocks.0.mlp.{name}"] for name in ("left", "gains", "right"))
    assert left.any() and torch.allclose(layer.product(), 2 / 3 * (left * gains) @ right, atol=1e-7)
    assert file.metadata["ss_network_module"] == "lycoris.kohya"
    assert file.metadata["ss_network_args"] == '{"algo": "gained"}'
    assert inspect(file).algorithms == {"gained": len(file.layers)}


def test_training_starts_from_an_adapters_file(made_up_adapter, tmp_path):
    denoiser, state = trained()
    matched = match_layers(read_lora(saved(tmp_path, state)), denoiser.specs, FAMILY)
    config = config_from_file(matched, denoiser.specs, AdapterConfig(targets="everything"))
    assert (config.algorithm, config.rank, config.alpha) == ("gained", 3, 2.0)
    weights = build_initial_weights(matched, denoiser.specs, FAMILY, config)
    assert all(torch.equal(weights[name], state.weights[name]) for name in state.weights)
    larger = dataclasses.replace(config, rank=5)
    grown = build_initial_weights(matched, denoiser.specs, FAMILY, larger)
    layer = {name: grown[f"blocks.0.mlp.{name}"] for name in Gained.suffixes}
    assert torch.allclose(2 / 5 * Gained.compose(layer), matched.layers["blocks.0.mlp"].product(), atol=1e-6)
    with pytest.raises(ValueError, match="the file holds gained weights; set the algorithm to it, not lora"):
        build_initial_weights(matched, denoiser.specs, FAMILY, AdapterConfig(targets="everything"))


@pytest.fixture
def gained_file(made_up_adapter, tmp_path):
    """A file for the checkpoint of tests/support/lora_files.py, and its differences by the weights' keys."""
    torch.manual_seed(0)
    tensors, differences = {}, {}
    for key, name in NAMES.items():
        out, *rest = SHAPES[key]
        factors = {"left": torch.randn(out, 4), "gains": torch.rand(1, 4)}
        factors["right"] = torch.randn(4, torch.Size(rest).numel())
        tensors |= {f"{name}.gained_{part}": tensor for part, tensor in factors.items()}
        tensors[f"{name}.alpha"] = torch.tensor(2.0)
        differences[f"{key}.weight"] = (0.5 * Gained.compose(factors)).reshape(SHAPES[key])
    return lora_path(tmp_path, tensors), differences


def test_an_adapter_is_merged_into_a_checkpoint(gained_file, tmp_path):
    lora, differences = gained_file
    base, output = tmp_path / "base.safetensors", tmp_path / "merged.safetensors"
    save_file(checkpoint(), base)
    merge_files(base, [(lora, 0.5)], output)
    merged = load_file(output)
    for key, weight in checkpoint().items():
        expected = weight + 0.5 * differences[key] if key in differences else weight
        assert torch.allclose(merged[key], expected, atol=1e-5)


def test_an_adapter_is_resized_to_a_lora(gained_file, tmp_path):
    lora, differences = gained_file
    resize_file(lora, tmp_path / "small.safetensors", rank=4, dtype=torch.float32)
    small = read_lora(tmp_path / "small.safetensors")
    assert set(small.methods.values()) == {"lora"}
    for key, name in NAMES.items():
        assert torch.allclose(
            small.layers[name].product(), differences[f"{key}.weight"].flatten(1), atol=1e-4
        )


def test_a_damaged_file_of_an_adapter_is_refused_by_what_is_missing(made_up_adapter, tmp_path):
    with pytest.raises(ValueError, match="gained_gains is missing"):
        read_lora(
            lora_path(tmp_path, {"x.gained_left": torch.ones(4, 2), "x.gained_right": torch.ones(2, 4)})
        )


def test_job_files_and_presets_name_an_adapter(made_up_adapter, tmp_path):
    for name in ("gained", "gained_bold"):
        assert graph(tmp_path, network={"type": name})["GraftBuildLora"]["algorithm"] == "gained"
    with pytest.raises(ValueError, match="diffusers knows plain LoRA only, and network.type is gained"):
        graph(tmp_path, network={"type": "gained"}, save={"save_format": "diffusers"})
    config = apply_preset('{"name_algo_map": {".*mlp": {"algo": "gnd"}}}', AdapterConfig())
    assert [algorithm for _, algorithm in config.algorithms] == ["gained"]


def test_an_unknown_algorithm_is_refused_with_all_that_there_are(made_up_adapter):
    with pytest.raises(ValueError, match="choose one of lora, .*, full, gained"):
        build_adapters(TinyDenoiser().specs, AdapterConfig(algorithm="unknown"))
