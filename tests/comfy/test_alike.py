"""Alike blocks are estimated once, and the estimate is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graft.commands.bench.base_models import NARROW, SMALL, batch_of, build_outline
from graft.tests.support import dynamic_vram
from graft.training.adapters.build import select
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import AdapterConfig
from graft.training.memory.alike import Blocks
from graft.training.memory.estimate import estimate_step

pytestmark = dynamic_vram.is_off("`graft plan` is a program of its own, which does not switch it on")
UNET = {
    "num_res_blocks": [2, 2],
    "channel_mult": [1, 2],
    "transformer_depth": [0, 0, 1, 1],
    "transformer_depth_output": [0, 0, 0, 1, 1, 1],
    "transformer_depth_middle": 1,
}
DEEPER = {
    "flux": (NARROW["flux"], {"depth": 4, "depth_single_blocks": 5}, ("none", "block"), 4),
    "sd3": (SMALL["sd3"], {}, ("selective",), 3),
    "sdxl": (NARROW["sdxl"], UNET, ("none",), 12),
}
"""Model, its blocks, the modes to try, and the most blocks to compute: those that differ, the first (whose
input has no gradient) and the last (of SD3, which makes no text)."""


def deeper(name):
    """Return an outline with alike blocks, and a batch for it."""
    model, blocks, *_ = DEEPER[name]
    deeper = replace(model, network={**model.network, **blocks})
    return ComfyDenoiser(build_outline(deeper, torch.bfloat16)), batch_of(model)


@pytest.mark.parametrize("name", DEEPER)
def test_alike_blocks_are_estimated_as_if_each_were_computed(name, monkeypatch):
    (denoiser, batch), (_, _, modes, different) = deeper(name), DEEPER[name]
    config = AdapterConfig(rank=4)
    adapted = select(denoiser.specs, denoiser.family, config)
    computed, compute = [], Blocks.compute

    def count(self, structure, forward, *args, **kwargs):
        def counted(*args, **kwargs):
            computed.append(structure)
            return forward(*args, **kwargs)

        return compute(self, structure, counted, *args, **kwargs)

    monkeypatch.setattr(Blocks, "compute", count)
    for mode in modes:
        computed.clear()
        once = estimate_step(denoiser, adapted, config, batch, mode, torch.bfloat16)
        assert len(computed) <= different < len(once.inputs)
        each = estimate_step(denoiser, adapted, config, batch, mode, torch.bfloat16, alike=False)
        assert (once.flops, once.inputs, once.loose) == (each.flops, each.inputs, each.loose)
        assert once.saved == pytest.approx(each.saved, rel=0.002)
        assert once.peak == pytest.approx(each.peak, rel=0.005)


def test_blocks_with_other_adapters_are_not_alike():
    denoiser, batch = deeper("flux")
    whole = select(denoiser.specs, denoiser.family, AdapterConfig(rank=4))
    adapted = {path: spec for path, spec in whole.items() if not path.startswith("single_blocks.3.")}
    config = AdapterConfig(rank=4)
    once, each = (
        estimate_step(denoiser, adapted, config, batch, "none", torch.bfloat16, alike=alike)
        for alike in (True, False)
    )
    assert once == each
    assert once != estimate_step(denoiser, whole, config, batch, "none", torch.bfloat16)
