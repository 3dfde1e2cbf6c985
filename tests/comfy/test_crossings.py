"""What passes between the host and a device in a training step; on the pretended device, which counts it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graft.tests import card
from graft.training.comfy.denoiser import ComfyDenoiser
from graft.training.config import MemoryConfig
from graft.training.loop import train

from .test_families import CONFIG, Samples
from .tiny_models import TINY


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
