"""A method whose files this ComfyUI does not apply is refused, or noted, before it is trained."""

from __future__ import annotations

import comfy.lora
import pytest
import torch

from graft.training.adapters.build import ADAPTERS
from graft.training.comfy.run import loader_faults
from graft.training.comfy.run.graph_run import GraphRun
from graft.training.comfy.run.loader_faults import loader_notes, require_applied
from graft.training.config import AdapterConfig, TrainConfig

FAILING = ("oft", "boft")
"""In ComfyUI 0.3.75 and 0.33.0."""


@pytest.fixture
def dynamic(monkeypatch):
    monkeypatch.setattr(loader_faults, "_is_dynamic", lambda: True)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_method_that_fails_in_16_bits_is_noted_and_every_other_passes(name, caplog):
    notes = loader_notes(AdapterConfig(algorithm=name))
    assert bool(notes) == (name in FAILING) and all(f"algorithm {name}" in note for note in notes)
    assert not caplog.records
    tensors = {"x.oft_blocks": torch.ones(4, 4, 4).triu(), "x.alpha": torch.tensor(0.0)}
    if name == "oft":  # the fault itself
        patch = comfy.lora.load_lora(tensors, {"x": "x.weight"})["x.weight"]
        for dtype, applies in ((torch.float32, True), (torch.bfloat16, False)):
            weight = torch.ones(16, 8, dtype=dtype)
            patches = [(1.0, patch, 1.0, None, None)]
            found = comfy.lora.calculate_weight(patches, weight.clone(), "x", intermediate_dtype=dtype)
            assert torch.equal(found, weight) != applies


@pytest.mark.parametrize("name", FAILING)
def test_under_dynamic_vram_it_is_refused_also_where_a_pattern_names_it(name, dynamic):
    for config in (AdapterConfig(algorithm=name), AdapterConfig(algorithms=(("*mlp*", name),))):
        with pytest.raises(ValueError, match=f"algorithm {name}: .*--disable-dynamic-vram"):
            require_applied(config)


def test_other_methods_are_trained_under_dynamic_vram(dynamic):
    for name in set(ADAPTERS) - set(FAILING):
        require_applied(AdapterConfig(algorithm=name))


def test_a_run_is_refused_before_its_folder_is_made(dynamic):
    config = TrainConfig(adapter=AdapterConfig(algorithm="oft"))
    with pytest.raises(ValueError, match="algorithm oft"):
        GraphRun(
            node=None, name="run", denoiser=None, dataset=None, config=config, start=None, steps=1
        ).train()
