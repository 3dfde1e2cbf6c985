"""A model is known again by its weights, and only by them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import comfy.model_management
import comfy.model_sampling
import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.tests.support.small_base import STARTER
from graft.tests.support.starter_base import patched, with_difference
from graft.tests.support.two_steps import CONFIG, Samples
from graft.training.comfy.model import loading
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.fingerprint import (
    earlier_fingerprint,
    fingerprint,
    sampling_settings,
    settings,
)
from graft.training.comfy.model.weights import named_numbers
from graft.training.files import tensor_digest
from graft.training.files.tensor_digest import sample_digest
from graft.training.loop import train
from graft.training.run.execute import run_key

from ..support.tiny_models import TINY


def fingerprint_of(patcher):
    return ComfyDenoiser(patcher).fingerprint


@pytest.mark.parametrize("name", ["sd35m", "sdxl", "flux"])
def test_a_model_stays_the_same_while_a_clone_of_it_is_loaded_with_a_lora(name):
    """The sampler has drawn with the LoRA, and now the run is to go on for more steps."""
    patcher = TINY[name]()
    fresh = fingerprint_of(patcher)
    comfy.model_management.load_models_gpu([with_difference(patcher)])
    assert fingerprint_of(patcher) == fresh
    comfy.model_management.unload_all_models()
    assert fingerprint_of(patcher) == fresh


def test_other_weights_are_another_model():
    assert fingerprint_of(TINY["sd35m"](seed=0)) == fingerprint_of(TINY["sd35m"](seed=0))
    assert fingerprint_of(TINY["sd35m"](seed=0)) != fingerprint_of(TINY["sd35m"](seed=1))


@pytest.mark.parametrize("name", ["sdxl", "sd35m", "flux"])
def test_every_number_of_every_weight_counts(name):
    """A LoRA merged into one block, a norm that was trained: none is the old base any more."""
    network = TINY[name]().model.diffusion_model
    fresh, changed = fingerprint(network), []
    for _, tensor in named_numbers(network):
        with torch.no_grad():
            number = tensor.view(-1)[-1]
            before = number.clone()
            number += 1
            again = clone(network)
            changed.append(fingerprint(again))
            number.copy_(before)
    assert len({fresh, *changed}) == len(changed) + 1 == len(list(named_numbers(network))) + 1


def clone(network):
    """The same weights in a module of which nothing is known."""
    holder = torch.nn.Module()
    holder.__dict__.update(network.__dict__)
    return holder


def test_a_change_between_the_numbers_that_are_sampled_is_seen_in_a_new_module():
    weights = torch.arange(100_000, dtype=torch.float32).reshape(100, 1000)
    one, other = linear(weights), linear(weights.clone())
    other.weight.data[3, 777] += 1
    assert sample_digest(one.weight) == sample_digest(other.weight)
    assert fingerprint(one) != fingerprint(other)


def linear(weight, **types):
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.__dict__.update(types)
    return layer


def test_the_type_that_comfyui_keeps_numbers_in_does_not_count():
    numbers = torch.randn(40, 40)
    for exact in (numbers.bfloat16(), numbers.half(), numbers, (numbers / 8).to(torch.float8_e4m3fn)):
        wider = [dtype for dtype in (torch.bfloat16, torch.half, torch.float32) if fits(exact, dtype)]
        kept = [fingerprint(linear(exact.to(dtype))) for dtype in (exact.dtype, *wider)]
        assert len(set(kept)) == 1, exact.dtype


def fits(tensor, dtype):
    return torch.equal(tensor.to(dtype).to(torch.float32), tensor.to(torch.float32))


def test_weights_count_as_the_model_computes_with_them():
    """Under dynamic VRAM they keep the file's numbers, and are rounded only on their way to the device."""
    in_file = torch.randn(40, 40)
    loaded = linear(in_file.bfloat16(), weight_comfy_model_dtype=torch.bfloat16)
    dynamic = linear(in_file, weight_comfy_model_dtype=torch.bfloat16)
    assert fingerprint(loaded) == fingerprint(dynamic) != fingerprint(linear(in_file))


def test_the_same_numbers_are_the_same_base_in_every_version_of_comfyui():
    """Found on 0.3.75 and on 0.33.0: a run goes on after an update."""
    for name, known in IN_EVERY_VERSION.items():
        network = TINY[name]().model.diffusion_model
        for place, (_, tensor) in enumerate(named_numbers(network)):
            pattern = torch.arange(tensor.numel(), dtype=torch.float32).add(place).remainder(251)
            tensor.copy_((pattern - 125).div(128).view(tensor.shape))
        assert fingerprint(network) == known, name


IN_EVERY_VERSION = {
    "sdxl": "04e6c3d04e01f11eca4f8758ab3b5975",
    "sd35m": "9a2db8073ed7a04dd79aae7ad6014714",
    "flux": "d99f9ea4cbefb90255446041e41c845c",
    "zimage": "112d83dbba208774196ef197dfe4e90d",
    "qwen": "44e75271e11485050f354b6337c9e9f6",
}


def test_a_base_in_scaled_fp8_is_the_same_in_both_of_comfyuis_layouts():
    """0.3.75 keeps the scale beside the weight, newer versions in a tensor of a class of their own."""
    layouts = pytest.importorskip("comfy.quant_ops")
    small = layouts.QuantizedTensor.from_float(torch.randn(16, 16), "TensorCoreFP8Layout")
    data, scale = parts_of(small)
    beside = linear(data, scale_weight=torch.nn.Parameter(scale, requires_grad=False))
    assert fingerprint(linear(small)) == fingerprint(beside) != fingerprint(linear(data))


def parts_of(small):
    names, _ = small.__tensor_flatten__()
    return [getattr(small, name) for name in names]


def test_a_merge_that_changes_one_block_is_trained_anew(base, tmp_path):
    """Today's file and a copy with one weight changed, through Load Base Model: other bases, other runs."""
    folder = base / "models" / "checkpoints"
    tensors = load_file(STARTER)
    save_file(tensors, folder / "plain.safetensors")
    name = "model.diffusion_model.joint_blocks.2.x_block.mlp.fc1.weight"
    save_file({**tensors, name: tensors[name] * 3}, folder / "merged.safetensors")
    found = [ComfyDenoiser(load(file)[0]) for file in ("plain.safetensors", "merged.safetensors")]
    keys = [run_key(denoiser, Samples(TINY["sd3"]), CONFIG, None) for denoiser in found]
    assert found[0].fingerprint != found[1].fingerprint and keys[0] != keys[1]


def load(name):
    return loading.load_base(name, [], loading.FROM_CHECKPOINT, "auto")


@pytest.fixture
def counted(monkeypatch):
    """Counts the tensors that are read whole."""
    calls = []

    def count(tensor):
        calls.append(tuple(tensor.shape))
        return whole(tensor)

    whole = tensor_digest.tensor_digest
    monkeypatch.setattr(tensor_digest, "tensor_digest", count)
    return calls


def test_a_file_is_digested_once_however_often_it_is_loaded(base, counted):
    file = base / "models" / "checkpoints" / "once.safetensors"
    file.write_bytes(STARTER.read_bytes())
    os.utime(file, (1e9, 1e9))
    first = ComfyDenoiser(load(file.name)[0]).fingerprint
    assert len(counted) >= len(load_file(STARTER))
    counted.clear()
    again = load(file.name)
    assert ComfyDenoiser(again[0]).fingerprint == first and not of_layers(counted)
    other = file.with_name("other")
    other.write_bytes(STARTER.read_bytes())
    os.utime(other, (1e9, 1e9))
    os.replace(other, file)  # of the same name, size and date
    assert ComfyDenoiser(load(file.name)[0]).fingerprint == first and of_layers(counted)


def of_layers(shapes):
    """Those of at least two sides; the model's own noise schedule is no file's."""
    return [shape for shape in shapes if len(shape) > 1]


def test_what_the_file_tells_of_a_base_is_what_its_weights_do(base, monkeypatch):
    file = base / "models" / "checkpoints" / "told.safetensors"
    file.write_bytes(STARTER.read_bytes())
    told = load(file.name)
    monkeypatch.setattr(loading, "remember", lambda *ignored: None)
    read = load(file.name)
    for one, other in (
        (told[0].model.diffusion_model, read[0].model.diffusion_model),
        (told[2].first_stage_model, read[2].first_stage_model),
    ):
        assert fingerprint(one) == fingerprint(other)


def test_cancel_ends_the_digesting(monkeypatch):
    def cancel():
        raise InterruptedError

    monkeypatch.setattr(comfy.model_management, "throw_exception_if_processing_interrupted", cancel)
    with pytest.raises(InterruptedError):
        fingerprint(TINY["sd3"]().model.diffusion_model)


def test_states_of_earlier_versions_go_on_and_belong_to_the_new_base_from_then_on():
    """They know a base by a sample of its weights."""
    patcher = TINY["sd3"]()
    denoiser, samples = ComfyDenoiser(patcher), Samples(TINY["sd3"])
    parts = (denoiser.network, patcher.patches, denoiser.sampling)
    state = train(denoiser, samples, CONFIG, None, steps=1)
    earlier = replace(state, base=earlier_fingerprint(*parts))
    assert earlier.base != denoiser.fingerprint
    reached = train(denoiser, samples, CONFIG, earlier, steps=1)
    assert reached.base == denoiser.fingerprint
    assert reached.losses == train(denoiser, samples, CONFIG, state, steps=1).losses
    with pytest.raises(ValueError, match="belongs to another base model"):
        train(denoiser, samples, CONFIG, replace(state, base="another"), steps=1)


def test_the_earlier_fingerprint_is_what_it_was():
    modules = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(40))
    for place, tensor in enumerate(modules.parameters()):
        tensor.data.fill_(place / 64)
    assert earlier_fingerprint(modules, {"shift": 3.0}) == "d34d59321ef8d3395d314956011bdadb"


def test_a_lora_on_the_model_counts_with_its_strength_and_its_numbers():
    patcher = TINY["sd35m"]()
    found = [
        patcher,
        with_difference(patcher),
        with_difference(patcher, strength=0.5),
        with_difference(patcher, seed=1),
    ]
    assert len({fingerprint_of(each) for each in found}) == len(found)


class AsInGGUF(torch.nn.Linear):
    """ComfyUI-GGUF's layers say of their state that it lies nowhere, and how large the largest is."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = torch.empty_like(self.weight, device="meta")
        destination["temp.weight"] = torch.empty(1, device="meta")


def gguf_layer(numbers):
    layer = AsInGGUF(4, 4, bias=False)
    weight = torch.nn.Parameter(torch.full((4, 4), numbers), requires_grad=False)
    weight.tensor_type = "Q8_0"
    layer.weight = weight
    return layer


def test_a_packed_weight_counts_with_its_bytes():
    found = [fingerprint(gguf_layer(numbers)) for numbers in (1.0, 1.0, 2.0)]
    assert found[0] == found[1] != found[2]


def test_functions_in_the_network_count_with_what_they_were_made_with():
    plain = fingerprint_of(TINY["sd35m"]())
    found = [fingerprint_of(patched(strength)) for strength in (1.1, 1.1, 1.3)]
    assert found[0] == found[1] != found[2] and plain not in found


def test_settings_are_found_in_functions_and_objects_that_change_are_not():
    def itself(depth):
        return itself(depth - words["depth"])

    words = {"depth": 2, "again": itself, "state": object()}
    found = list(settings({"a": itself, "b": partial(itself, 3), "c": [True, None]}))
    assert any(entry.endswith("depth=2") for entry in found) and ".b.args.0=3" in found
    assert ".c.0=True" in found and not any("object at" in entry for entry in found)


def test_the_noise_schedule_counts():
    patcher = TINY["sd35m"]()
    shifted, fresh = patcher.clone(), fingerprint_of(patcher)

    class Shifted(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
        pass

    sampling = Shifted(patcher.model.model_config)
    sampling.set_parameters(shift=7.0)
    shifted.add_object_patch("model_sampling", sampling)
    assert fingerprint_of(shifted) != fresh


def test_the_kind_of_prediction_and_the_timesteps_count():
    """A schedule of the same noise levels may mean another target, or other timesteps."""
    config = TINY["sd35m"]().model.model_config
    flow = comfy.model_sampling.ModelSamplingDiscreteFlow
    found = []
    for law in (comfy.model_sampling.CONST, comfy.model_sampling.EPS):
        for multiplier in (1.0, 1000.0):
            sampling = type("ModelSampling", (flow, law), {})(config)
            sampling.set_parameters(shift=3.0, multiplier=multiplier)
            found.append(fingerprint(sampling, sampling_settings(sampling)))
    assert len(set(found)) == 4
