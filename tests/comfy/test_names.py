"""Graft's table of names beside the one that ComfyUI's loader builds, for every kind of network."""

from __future__ import annotations

import comfy.lora
import pytest

from graft.tests.comfy.test_text_encoders import clip_of
from graft.tests.comfy.tiny_models import SIBLINGS, TINY
from graft.tests.comfy.tiny_others import OTHERS
from graft.training.lora_file.names import Target, comfy_names, network_names, text_names

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
    return loaders(model, shapes), network_names(shapes), comfy_names(weights)


def test_every_name_that_comfyuis_loader_knows_is_read_as_the_same_rows(tables):
    theirs, read, _ = tables
    wrong = {name: (read.get(name), target) for name, target in theirs.items() if read.get(name) != target}
    assert not wrong


def test_every_name_said_to_be_comfyuis_is_in_its_loaders_table_with_the_same_rows(tables):
    theirs, _, known = tables
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
