"""On a device that is no CPU: what trains there, and what passes between it and the host.

These tests run on the pretended device of `tests/card.py`, which a process takes for good: the first one
starts the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graft.tests import card
from graft.training.comfy.denoiser import ComfyDenoiser
from graft.training.config import MemoryConfig
from graft.training.loop import train

from .test_families import CONFIG, Samples
from .tiny_models import TINY

DEVICE = os.environ.get("GRAFT_TEST_DEVICE", "cpu")
on_the_card = pytest.mark.skipif(DEVICE not in ("card", "dynamic"), reason="runs on the card")
HERE = Path(__file__).parent
THERE = (
    "test_on_a_card.py",
    "test_training.py",
    "test_first_lora.py::test_the_workflow_trains_saves_and_samples",
    "test_text_encoders.py",
    "test_fingerprint.py",
    "test_families.py::test_every_adapter_parameter_has_a_gradient_by_step_two",
    "test_families.py::test_the_base_is_byte_identical_after_training",
    "test_families.py::test_the_saved_file_through_the_stock_loader_is_the_attached_adapter",
)
"""The tests that run there; GRAFT_TEST_DEVICE=card runs all of them there, which takes minutes."""


@pytest.mark.skipif(DEVICE != "cpu", reason="this is another device")
def test_what_trains_on_the_cpu_trains_on_another_device():
    command = [sys.executable, "-m", "pytest", "-n0", "-q", *(str(HERE / name) for name in THERE)]
    environment = os.environ | {"GRAFT_TEST_DEVICE": "card"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@on_the_card
@pytest.mark.parametrize("mode", ["none", "block"])
@pytest.mark.parametrize("name", TINY)
def test_a_step_waits_for_the_device_only_where_the_network_does_and_at_its_end(name, mode):
    denoiser, steps = ComfyDenoiser(TINY[name]()), []
    config = replace(CONFIG, memory=MemoryConfig(dtype="fp32", checkpointing=mode))

    def on_step(progress):
        steps.append(card.crossed.copy())
        card.crossed.clear()

    train(denoiser, Samples(TINY[name]), config, None, steps=4, on_step=on_step)
    loss_and_norm = ["number", "number"]
    assert steps[-1] == forward(denoiser, TINY[name].batch()) + loss_and_norm


def forward(denoiser, batch):
    """What passes between the devices when a batch goes there and ComfyUI computes the network."""
    with torch.no_grad(), denoiser.hold(torch.float32):
        card.crossed.clear()
        x = denoiser.scale_latents(batch.latents.to(denoiser.device))
        sigma, _noise = (t.to(denoiser.device) for t in (torch.full((2,), 0.5), batch.latents))
        denoiser.denoise(x, sigma, batch)
        return card.crossed.copy()
