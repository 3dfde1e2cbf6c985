"""The Memory Plan node says what fits, on real classes, and changes nothing."""

from __future__ import annotations

import pytest

from graft.nodes.dataset import JoinDatasets, PreviewDataset
from graft.nodes.measure import MemoryPlan, ValidationLoss
from graft.nodes.validation_settings import ValidationSettings
from graft.tests.support.tiny_models import TINY
from graft.training.config import AdapterConfig, MemoryConfig
from graft.training.memory.weight_store import STORES


class Encoded:
    def largest_batch(self, size):
        return TINY["sd3"].batch(range(size), (12, 16))


def test_the_node_shows_every_plan_and_what_fits():
    memory = MemoryConfig(budget_gb=0.004)
    found = MemoryPlan.execute(TINY["sd3"](), Encoded(), AdapterConfig(rank=4), 2, None, memory)
    lines = found.result[0].splitlines()
    assert len(lines) == 3 + len(STORES) * 4 and lines[-1].endswith("of memory to use")
    assert lines[-2].startswith("measured with base ")
    assert "too large" in lines[1] and found.ui["text"] == [found.result[0]]


def test_a_model_that_cannot_be_estimated_says_so(monkeypatch):
    model = TINY["sd3"]()
    network = model.model.diffusion_model
    whole = network.forward
    monkeypatch.setattr(
        network, "forward", lambda x, *args, **kwargs: whole(x, *args, **kwargs)[: int(x.sum())]
    )
    with pytest.raises(ValueError, match="cannot be estimated .* starts with the fastest plan"):
        MemoryPlan.execute(model, Encoded(), AdapterConfig(rank=4), 2)


def test_pictures_that_are_encoded_already_are_refused_by_the_inputs_name():
    with pytest.raises(ValueError, match="^dataset_2: these images are encoded already"):
        JoinDatasets.execute(dataset_1=object(), dataset_2=Encoded())
    with pytest.raises(ValueError, match="^dataset: these images are encoded already"):
        PreviewDataset.execute(Encoded(), TINY["sd3"](), 4)


def test_pictures_that_are_not_encoded_are_refused_by_the_inputs_name():
    model, pictures = TINY["sd3"](), object()
    with pytest.raises(ValueError, match="^dataset: these images are not encoded"):
        MemoryPlan.execute(model, pictures, AdapterConfig(rank=4), 2)
    with pytest.raises(ValueError, match="^dataset: these images are not encoded"):
        ValidationLoss.execute(model, pictures)
    with pytest.raises(ValueError, match="^validation: these images are not encoded"):
        ValidationSettings.execute(pictures)
