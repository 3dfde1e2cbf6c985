"""A model is known again by its weights, and only by them."""

from __future__ import annotations

from functools import partial

import comfy.model_management
import comfy.model_sampling
import pytest
import torch

from graft.training.comfy.denoiser import ComfyDenoiser
from graft.training.comfy.fingerprint import fingerprint, settings

from .tiny_models import TINY


def fingerprint_of(patcher):
    return ComfyDenoiser(patcher).fingerprint


def with_difference(patcher, *, strength=1.0, seed=0):
    """A clone with a difference on the weight of every layer, as Load LoRA makes it."""
    generator, patched = torch.Generator().manual_seed(seed), patcher.clone()
    weights = {key: w for key, w in patcher.model.state_dict().items() if w.ndim > 1}
    patches = {key: ("diff", (torch.randn(w.shape, generator=generator),)) for key, w in weights.items()}
    patched.add_patches({k: p for k, p in patches.items() if k.startswith("diffusion_model.")}, strength)
    return patched


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


def test_one_weight_in_sixteen_and_every_number_counts():
    modules = [torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(40)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    assert fingerprint(*modules[:1]) == fingerprint(*modules[1:])
    with torch.no_grad():
        for layer in modules[1]:
            layer.weight += 1
    assert fingerprint(*modules[:1]) != fingerprint(*modules[1:])
    assert fingerprint({"shift": 3.0}) != fingerprint({"shift": 1.0})


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


def patched(strength, kind="attn1_output_patch"):
    """A MODEL with a function in its network, as FreeU makes it."""
    patcher, table = TINY["sd35m"]().clone(), {320: (strength, 0.2)}

    def scale(x, options):
        return x * table[320][0]

    getattr(patcher, f"set_model_{kind}")(scale)
    return patcher


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
