"""A row is a row: a new model or adapter is one row, and ComfyUI's nodes and `graft plan` have it.

The model's row stands for a class of ComfyUI's that its files are recognized as.
"""

from __future__ import annotations

import comfy.supported_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from graft.commands.cli import main
from graft.nodes.lora import BuildLora
from graft.tests.support import dynamic_vram
from graft.tests.support.made_up import MODEL, Gained
from graft.tests.support.tiny_models import FILES, TINY, state_dict
from graft.training.adapters.build import ADAPTERS
from graft.training.adapters.select import select
from graft.training.comfy.files.initial_lora import save_initial_state
from graft.training.comfy.files.trained_lora import lora_model
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.comfy.model.differentiable import make_differentiable
from graft.training.comfy.model.loading import clip_type
from graft.training.comfy.run.notes import run_notes
from graft.training.config import TrainConfig
from graft.training.family import FAMILIES

from ..support.adapter_cases import fresh_state


@pytest.fixture(autouse=True)
def schema_is_made_anew(monkeypatch):
    """ComfyUI makes a node's schema once; the tables have other rows here."""
    monkeypatch.setattr(BuildLora, "SCHEMA", None)


@pytest.fixture
def made_up_model(monkeypatch):
    monkeypatch.setitem(FAMILIES, "SD15", MODEL)


@pytest.fixture
def made_up_adapter(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "gained", Gained)


def options(name):
    return next(slot for slot in BuildLora.define_schema().inputs if slot.id == name).options


def test_build_lora_has_the_targets_of_a_model(made_up_model):
    assert "first half" in options("targets")
    config, text = built(TINY["sd15"](), targets="first half")
    chosen = select(ComfyDenoiser(TINY["sd15"]()).specs, MODEL, config)
    assert text.startswith(f"Made Up: {len(chosen)} layers") and all(
        "input_blocks" in path for path in chosen
    )


def built(model, **inputs):
    settings = {"algorithm": "lora", "rank": 2, "alpha": 0.0, "targets": "attn-mlp", **inputs}
    output = BuildLora.execute(model=model, **settings)
    return output.result[0], output.ui["text"][0]


def test_a_model_is_warned_about_and_named_in_its_loras(made_up_model):
    denoiser = ComfyDenoiser(TINY["sd15"]())
    assert denoiser.family is MODEL
    assert "Made Up: made up" in run_notes(denoiser, TrainConfig(), denoiser.family, 10)
    state = fresh_state(denoiser, TrainConfig())
    assert all(key.startswith("diffusion_model.input_blocks.") for key in list(lora_model(state, MODEL))[:2])


def test_text_encoder_files_are_loaded_by_a_models_row(made_up_model):
    assert clip_type(comfy.supported_models.SD15).name == "COSMOS"


@pytest.fixture
def planned(tmp_path):
    """A file of a whole model."""
    path, weights = tmp_path / "base.safetensors", state_dict(FILES["sd15"][0]())
    save_file({f"model.diffusion_model.{name}": t.contiguous() for name, t in weights.items()}, path)
    return path


@dynamic_vram.is_off("`graft plan` is a program of its own, which does not switch it on")
def test_a_model_is_planned_for(made_up_model, planned, capsys):
    assert main(["plan", str(planned), "--resolution", "64", "--rank", "4"]) == 0
    assert capsys.readouterr().out.startswith("Made Up, 64 pixels, batch 1, lora of rank 4")


@dynamic_vram.is_off("`graft plan` is a program of its own, which does not switch it on")
def test_an_adapter_is_planned_for(made_up_adapter, planned, capsys):
    assert main(["plan", str(planned), "--resolution", "64", "--algorithm", "gained", "--rank", "4"]) == 0
    assert capsys.readouterr().out.startswith("SD1.5, 64 pixels, batch 1, gained of rank 4")


class MadeUpBlock(nn.Module):
    """Adds to its input after its norm has saved it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        y = self.norm(x).square()
        x += y
        return x


MadeUpBlock.__module__ = "comfy.ldm.made_up"


def test_a_models_blocks_that_change_in_place_are_differentiable(made_up_model):
    x, block = torch.randn(2, 4, requires_grad=True), MadeUpBlock()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        block(x * 1).sum().backward()
    with make_differentiable(block):
        block(x * 1).sum().backward()
    expected = torch.autograd.grad((x + block.norm(x).square()).sum(), x)[0]
    assert torch.allclose(x.grad, expected)


def test_build_lora_has_an_adapter_and_starts_from_its_file(made_up_adapter, base, tmp_path):
    assert "gained" in options("algorithm")
    model = TINY["sd15"]()
    config, text = built(model, algorithm="gained")
    assert "trained parameters" in text
    denoiser = ComfyDenoiser(model)
    state = fresh_state(denoiser, TrainConfig(adapter=config))
    path = base / "models" / "loras" / "gained.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(lora_model(state, denoiser.family), path)
    assert {key.rpartition(".")[2] for key in load_file(path)} == {*Gained.suffixes.values(), "alpha"}
    config, text = built(model, start_from=path.name)
    layers = len(state.weights) // 3
    assert f"{layers} layers start from gained.safetensors, 0 fresh\ngained, rank 2, alpha 2" in text
    started = save_initial_state(denoiser, config, seed=1)[0].load()
    assert started.adapter.algorithm == "gained"
    assert all(torch.equal(started.weights[name], state.weights[name]) for name in state.weights)
