"""Graft's table of names beside the one that ComfyUI's loader builds, for every kind of network."""

from __future__ import annotations

from dataclasses import replace

import comfy.lora
import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.dev.exports.in_comfyui import FAMILIES
from graft.tests.support.tiny_clips import clip_of
from graft.tests.support.tiny_models import SIBLINGS, TINY
from graft.tests.support.tiny_others import OTHERS
from graft.training.adapters.build import restore_adapters
from graft.training.comfy.files import lora_files
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import AdapterConfig, TrainConfig
from graft.training.files.lora.diffusers import comfy_reads, diffusers_tensors
from graft.training.files.lora.initial_weights import build_initial_weights, match_layers
from graft.training.files.lora.names import (
    Target,
    comfy_names,
    in_diffusers_names,
    network_names,
    text_names,
)
from graft.training.files.lora.read import read_lora, split_key
from graft.training.files.lora.write import lora_tensors
from graft.training.loop import initial_state
from graft.training.tools.convert import convert
from graft.training.tools.merge import merge_files, merge_weight
from graft.training.tools.resize import resize

MODELS = {name: tiny for name, tiny in (TINY | SIBLINGS | OTHERS).items() if not tiny.missing}


def shapes_of(model):
    """Path of every tensor of the network -> its shape."""
    prefix = "diffusion_model."
    state = {key: tensor for key, tensor in model.state_dict().items() if key.startswith(prefix)}
    return {
        key.removeprefix(prefix).removesuffix(".weight"): tuple(tensor.shape) for key, tensor in state.items()
    }


def loaders(model, shapes):
    """What ComfyUI's loader means by every name that leads to a tensor of the network."""
    found = {}
    for name, target in comfy.lora.model_lora_keys_unet(model, {}).items():
        key, rows, turn = (target, None, None) if isinstance(target, str) else (*target, None)[:3]
        path = key.removeprefix("diffusion_model.").removesuffix(".weight")
        gated = name.endswith("proj_mlp") and "double_stream_modulation_img.lin" in shapes  # Flux.2's: half
        if path in shapes and not gated:
            shape = shapes[path] or (0,)
            _, first, count = rows or (0, 0, shape[0])
            found[name] = Target(path, first, min(count, shape[0] - first), turn is not None)
    return found


@pytest.fixture(scope="module", params=MODELS)
def tables(request):
    model = MODELS[request.param]().model
    shapes, state = shapes_of(model), model.state_dict()
    weights = {path: shape for path, shape in shapes.items() if f"diffusion_model.{path}.weight" in state}
    return loaders(model, shapes), network_names(shapes), comfy_names(weights), shapes


def test_every_name_that_comfyuis_loader_knows_is_read_as_the_same_rows(tables):
    theirs, read, *_ = tables
    wrong = {name: (read.get(name), target) for name, target in theirs.items() if read.get(name) != target}
    assert not wrong


def test_every_name_said_to_be_comfyuis_is_in_its_loaders_table_with_the_same_rows(tables):
    theirs, _, known, _ = tables
    wrong = {name: (target, theirs.get(name)) for name, target in known.items() if theirs.get(name) != target}
    assert not wrong


@pytest.mark.parametrize("family", ["sd15", "sdxl", "sd35m"])
def test_text_encoders_are_called_as_comfyuis_loader_calls_them(family):
    model = clip_of(family).cond_stage_model
    theirs = comfy.lora.model_lora_keys_clip(model, {})
    for name, key in theirs.items():
        encoder, _, path = key.removesuffix(".weight").partition(".transformer.")
        if path.startswith(("text_model.encoder", "encoder.block")):
            assert name in text_names(encoder, path)


def patched(patcher, tensors):
    """The network's weights with a LoRA through the stock loader, by their keys; every key must be known."""
    keys = comfy.lora.model_lora_keys_unet(patcher.model, {})
    patches = comfy.lora.load_lora(dict(tensors), keys, log_missing=False)
    used = {key for patch in patches.values() for key in getattr(patch, "loaded_keys", ())}
    whole = {key for key in tensors if key.endswith((".diff", ".diff_b", "_norm", ".set_weight"))}
    assert used | whole == set(tensors)
    weights = {key: tensor.clone() for key, tensor in patcher.model.state_dict().items()}
    for target, patch in patches.items():
        key, rows, turn = (target, None, None) if isinstance(target, str) else (*target, None)[:3]
        weights[key] = comfy.lora.calculate_weight([(0.5, patch, 1.0, rows, turn)], weights[key], key)
    return {key: weight for key, weight in weights.items() if key.startswith("diffusion_model.")}


def lora_of(names, shapes):
    """A LoRA for these names, no two of the same rows."""
    generator, tensors, taken = torch.Generator().manual_seed(0), {}, set()
    for name, target in names.items():
        shape = shapes[target.key]
        if len(shape) < 2 or (target.key, target.first) in taken:
            continue
        taken |= {(target.key, first) for first in range(target.first, target.first + target.rows)}
        tensors[f"{name}.lora_down.weight"] = torch.randn(2, *shape[1:], generator=generator)
        tensors[f"{name}.lora_up.weight"] = torch.randn(
            target.rows, 2, *(1,) * len(shape[2:]), generator=generator
        )
        tensors[f"{name}.alpha"] = torch.tensor(1.0)
    return tensors


LAYOUTS = {
    "sdxl": ("lora_unet_down", "lycoris_", "unet."),
    "sd35m": ("transformer.", "base_model.model.", "lora_transformer_", "lycoris_"),
    "flux": ("transformer.", "lora_transformer_", "lycoris_", "diffusion_model.single_blocks"),
    "flux2": ("transformer.", "lycoris_", "diffusion_model."),
    "chroma": ("transformer.", "diffusion_model."),
    "zimage": ("diffusion_model.layers", "lycoris_"),
    "lumina2": ("diffusion_model.layers", "lycoris_"),
    "qwen": ("transformer.", "transformer_blocks.", "lycoris_"),
    "hidream": ("transformer.", "lycoris_"),
}


@pytest.mark.feature(45)
@pytest.mark.parametrize(
    ("family", "prefix"), [(family, prefix) for family, prefixes in LAYOUTS.items() for prefix in prefixes]
)
def test_a_file_merges_converts_and_starts_as_comfyuis_loader_renders_it(tmp_path, family, prefix):
    patcher = MODELS[family]()
    shapes = shapes_of(patcher.model)
    names = {n: t for n, t in loaders(patcher.model, shapes).items() if n.startswith(prefix)}
    tensors = lora_of({n: t for n, t in names.items() if "proj_mlp" not in n}, shapes)  # 4 times as wide
    lora, base = tmp_path / "lora.safetensors", tmp_path / "base.safetensors"
    save_file(tensors, lora)
    state = patcher.model.state_dict()
    save_file({k: t.contiguous() for k, t in state.items() if k.startswith("diffusion_model.")}, base)
    expected = patched(patcher, tensors)
    merge_files(base, [(lora, 0.5)], tmp_path / "merged.safetensors")
    assert_close(load_file(tmp_path / "merged.safetensors"), expected)
    file, checkpoint = read_lora(lora), {key: tuple(t.shape) for key, t in load_file(base).items()}
    for layout in ("kohya", "native"):
        assert_close(patched(patcher, convert(file, layout, shapes=checkpoint)), expected)
    denoiser = ComfyDenoiser(patcher)
    matched = match_layers(file, denoiser.specs, denoiser.family)
    adapted = {name for name, target in names.items() if target.key in denoiser.specs}
    assert not [key for key in matched.left_out if key.rsplit(".lora_")[0].removesuffix(".alpha") in adapted]
    assert matched.layers
    for path, layer in matched.layers.items():
        key = f"diffusion_model.{path}.weight"
        difference = 0.5 * layer.product().reshape(state[key].shape)
        assert_close({key: state[key] + difference}, {key: expected[key]})


def assert_close(found, expected):
    for key, weight in expected.items():
        assert torch.allclose(found[key].cpu(), weight.cpu(), atol=1e-4, rtol=1e-4), key


def test_whole_differences_are_merged_and_resized_as_comfyuis_loader_applies_them(tmp_path):
    patcher = MODELS["sdxl"]()
    state = patcher.model.state_dict()
    layers = {
        "middle_block_0_in_layers_2": {"lora_down.weight": 1, "lora_up.weight": 1, "diff_b": 1},
        "middle_block_0_in_layers_0": {"w_norm": 1, "b_norm": 1},
        "middle_block_1_proj_in": {"diff": 1, "diff_b": 1},
        "middle_block_2_out_layers_3": {"set_weight": 1},
        "input_blocks_1_0_in_layers_0": {"b_norm": 1},
    }
    tensors = {}
    for name, suffixes in layers.items():
        path = next(p for p in shapes_of(patcher.model) if p.replace(".", "_") == name)
        weight, bias = (state[f"diffusion_model.{path}.{end}"] for end in ("weight", "bias"))
        for suffix in suffixes:
            shape = bias.shape if suffix in ("diff_b", "b_norm") else weight.shape
            if suffix.startswith("lora_"):
                shape = (2, *weight.shape[1:]) if "down" in suffix else (weight.shape[0], 2, 1, 1)
            tensors[f"lora_unet_{name}.{suffix}"] = torch.randn(shape)
    lora, base = tmp_path / "lora.safetensors", tmp_path / "base.safetensors"
    save_file(tensors, lora)
    save_file({k: t.contiguous() for k, t in state.items() if k.startswith("diffusion_model.")}, base)
    expected = patched(patcher, tensors)
    report = merge_files(base, [(lora, 0.5)], tmp_path / "merged.safetensors")
    assert_close(load_file(tmp_path / "merged.safetensors"), expected)
    alone = "lora_unet_input_blocks_1_0_in_layers_0.b_norm"  # which ComfyUI takes beside a w_norm only
    assert f"1 keys are ignored by ComfyUI, so here too, and were left out:\n  {alone}" in report
    resized = resize(read_lora(lora), rank=4096)
    assert_close(patched(patcher, resized), expected)
    checkpoint = {key: tuple(t.shape) for key, t in load_file(base).items()}
    for layout in ("kohya", "native"):
        assert_close(patched(patcher, convert(read_lora(lora), layout, shapes=checkpoint)), expected)


MAGNITUDES = {"over inputs": (1, 64), "over outputs": (96, 1)}


@pytest.mark.parametrize("axis", MAGNITUDES)
@pytest.mark.parametrize("factors", ["lora", "loha", "lokr"])
def test_magnitudes_of_every_method_and_axis_are_merged_and_resized_as_comfyuis_loader_applies_them(
    tmp_path, factors, axis
):
    tensors = {"x.dora_scale": torch.rand(MAGNITUDES[axis]) + 0.5, "x.alpha": torch.tensor(1.0)}
    if factors == "lora":
        tensors |= {"x.lora_down.weight": torch.randn(2, 64), "x.lora_up.weight": torch.randn(96, 2)}
    elif factors == "loha":
        tensors |= {f"x.hada_w{i}_a": torch.randn(96, 2) for i in "12"}
        tensors |= {f"x.hada_w{i}_b": torch.randn(2, 64) for i in "12"}
    else:
        tensors |= {"x.lokr_w1": torch.randn(4, 4), "x.lokr_w2": torch.randn(24, 16)}
    save_file(tensors, tmp_path / "lora.safetensors")
    base = torch.randn(96, 64)
    file = read_lora(tmp_path / "lora.safetensors")
    save_file(resize(file, rank=64), tmp_path / "resized.safetensors")
    for name in ("lora", "resized"):
        [patch] = comfy.lora.load_lora(load_file(tmp_path / f"{name}.safetensors"), {"x": "k"}).values()
        [layer] = read_lora(tmp_path / f"{name}.safetensors").layers.values()
        for strength in (1.0, 0.5):
            theirs = comfy.lora.calculate_weight([(strength, patch, 1.0, None, None)], base.clone(), "k")
            assert torch.allclose(merge_weight(base, layer, strength), theirs, atol=1e-4)
    assert ("over outputs" in layer.title) == (axis == "over outputs")


def test_no_network_of_comfyuis_is_taken_for_one_in_diffusers_names(tables):
    assert not in_diffusers_names(tables[3])
    assert in_diffusers_names(("single_transformer_blocks.0.attn.to_q", "x_embedder"))


@pytest.mark.parametrize("family", ["SD1.5", "SDXL", "Lumina2", "Flux.2", "Klein", "Chroma"])
def test_diffusers_names_that_comfyui_does_not_read_merge_convert_and_start_whole(
    tmp_path, family, monkeypatch
):
    patcher = FAMILIES[family]()
    denoiser, state = ComfyDenoiser(patcher), patcher.model.state_dict()
    fresh = initial_state(denoiser, TrainConfig(adapter=AdapterConfig(rank=2, targets="linear")))
    weights = {name: torch.randn(tensor.shape) for name, tensor in fresh.weights.items()}
    trained = replace(fresh, weights=weights)
    lora, base = tmp_path / "lora.safetensors", tmp_path / "base.safetensors"
    tensors = diffusers_tensors(trained, denoiser.family, torch.float32)
    unread = {split_key(key)[0] for key in tensors} - loaders(patcher.model, shapes_of(patcher.model)).keys()
    assert unread and not comfy_reads("diffusers (PEFT)", denoiser.family)
    save_file(tensors, lora)
    save_file({k: t.contiguous() for k, t in state.items() if k.startswith("diffusion_model.")}, base)
    expected = patched(patcher, lora_tensors(trained, denoiser.family))
    merge_files(base, [(lora, 0.5)], tmp_path / "merged.safetensors")
    assert_close(load_file(tmp_path / "merged.safetensors"), expected)
    monkeypatch.setattr(lora_files, "lora_file_path", lambda name: lora)
    merged, _, report = lora_files.merge_lora(patcher, None, "lora.safetensors", 0.5, 1.0)
    assert report == f"lora.safetensors: merged into {len(weights) // 2} weights"
    for key, patches in merged.patches.items():
        weight = comfy.lora.calculate_weight(patches, state[key].clone(), key)
        assert_close({key: weight}, {key: expected[key]})
    file, checkpoint = read_lora(lora), {key: tuple(t.shape) for key, t in load_file(base).items()}
    for layout in ("kohya", "native"):
        assert_close(patched(patcher, convert(file, layout, shapes=checkpoint)), expected)
    matched = match_layers(file, denoiser.specs, denoiser.family)
    assert not matched.left_out and len(matched.layers) == len(weights) / 2
    start = build_initial_weights(matched, denoiser.specs, denoiser.family, fresh.adapter)
    before, after = (
        restore_adapters(denoiser.specs, fresh.adapter, w, torch.device("cpu")) for w in (weights, start)
    )
    assert all(torch.allclose(after[path].product(), before[path].product(), atol=1e-4) for path in before)
