"""What passes between the host and a device in a training step; on the pretended device, which counts it."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from comfy.model_management import get_torch_device

from graft.tests.support import card
from graft.tests.support.two_steps import CONFIG, Samples
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import MemoryConfig
from graft.training.loop import train
from graft.training.memory.activation_checkpointing import MODES
from graft.training.memory.offload import SMALLEST_INPUT

from ..support.tiny_models import TINY


@pytest.mark.parametrize("mode", ["none", "block"])
@pytest.mark.parametrize("name", TINY)
def test_a_step_waits_for_the_device_only_where_the_network_does_and_at_its_end(name, mode):
    denoiser, steps = ComfyDenoiser(TINY[name]()), []
    config = replace(CONFIG, memory=MemoryConfig(dtype="fp32", checkpointing=mode))

    def on_step(progress, handles):
        steps.append(card.crossed.copy())
        card.crossed.clear()

    train(denoiser, Samples(TINY[name]), config, None, steps=4, on_step=on_step)
    loss_and_norm = ["number", "number"]
    assert steps[-1] == forward(denoiser, TINY[name].batch()) + loss_and_norm


@pytest.mark.feature(88)
@pytest.mark.skipif(card.DEVICE == "cpu", reason="on the CPU, host memory is no other")
def test_inputs_that_wait_in_host_memory_leave_the_device():
    h = torch.ones(SMALLEST_INPUT, device=get_torch_device(), requires_grad=True)
    x, inputs = h, []
    for _ in range(3):
        h = h * 1
        inputs.append(weakref.ref(h))
        h = MODES["block-offload"](torch.square, h)
    assert [there() for there in inputs] == [None] * 3
    h.sum().backward()
    assert x.grad.cpu().eq(8).all()


def forward(denoiser, batch):
    """What passes between the devices when a batch goes there and ComfyUI computes the network."""
    with torch.no_grad(), denoiser.hold(torch.float32):
        card.crossed.clear()
        x = denoiser.scale_latents(batch.latents.to(denoiser.device))
        sigma, _noise = (t.to(denoiser.device) for t in (torch.full((2,), 0.5), batch.latents))
        denoiser.denoise(x, sigma, batch)
        return card.crossed.copy()
