"""The laws of memory on ComfyUI's own classes."""

from __future__ import annotations

import pytest
import torch

from graft.tests.comfy.tiny_models import TINY
from graft.tests.memory.helpers import step_gradients
from graft.training.comfy.denoiser import ComfyDenoiser
from graft.training.config import AdapterConfig, TrainConfig
from graft.training.memory.checkpointing import MODES

CONFIG = TrainConfig(adapter=AdapterConfig(rank=4))


@pytest.mark.parametrize("name", TINY)
def test_every_family_has_the_same_gradients_in_every_checkpointing_mode(name):
    denoiser, batch = ComfyDenoiser(TINY[name]()), TINY[name].batch()
    value, expected = step_gradients(denoiser, batch, CONFIG)
    for mode in MODES:
        again, gradients = step_gradients(denoiser, batch, CONFIG, mode)
        assert value == again, mode
        assert all(g is None or torch.equal(gradients[name], g) for name, g in expected.items()), mode
