"""`graft plan`: a run is planned from the header of a file."""

from __future__ import annotations

from dataclasses import replace

import comfy.ops
import pytest
import torch
from comfy.ldm.flux.model import Flux, FluxParams
from safetensors.torch import save_file

from graft.commands.bench.base_models import SMALL
from graft.commands.cli import main
from graft.commands.plan import read_memory, read_size
from graft.tests.support import dynamic_vram
from graft.tests.support.tiny_models import FILES, fields, state_dict
from graft.training.adapters.build import select
from graft.training.comfy.model import outline as module
from graft.training.comfy.model.outline import outline, outlined_batch
from graft.training.config import AdapterConfig
from graft.training.family import FAMILIES, Caption
from graft.training.memory.estimate import estimate_step
from graft.training.memory.weight_store import STORES, weight_bytes

pytestmark = dynamic_vram.is_off("`graft plan` is a program of its own, which does not switch it on")
PLANNED = [name for name, (_, family) in FILES.items() if "Flux" not in family]
"""ComfyUI takes every Flux to have the 24 heads of the real one."""


@pytest.fixture
def tiny_captions(monkeypatch):
    """The SD3 files here take narrower captions; U-Nets are as they are."""
    for row in ("SD3", "SD35Medium", "SD35Large"):
        monkeypatch.setitem(FAMILIES, row, replace(FAMILIES[row], caption=Caption(8, 64, 2048)))


@pytest.mark.parametrize("name", PLANNED)
def test_every_file_is_planned_without_its_weights(name, monkeypatch, tmp_path, tiny_captions):
    shapes = {f"model.diffusion_model.{k}": t.to("meta") for k, t in state_dict(FILES[name][0]()).items()}
    monkeypatch.setattr(module, "_shapes", lambda path: shapes)
    denoiser = outline(tmp_path / "model.safetensors")
    assert denoiser.family.name == FILES[name][1]
    config = AdapterConfig(rank=4)
    adapted = select(denoiser.specs, denoiser.family, config)
    batch = outlined_batch(denoiser, 2, 128, 64)
    assert batch.latents.shape[-2:] == (8, 16)
    estimate = estimate_step(denoiser, adapted, config, batch, "none", torch.bfloat16)
    assert 0 < estimate.saved < estimate.peak and estimate.flops > 0


def flux(monkeypatch, tmp_path, prefix="model.diffusion_model.", dtype=torch.bfloat16):
    settings = {n: v for n, v in SMALL["flux"].network.items() if n in ("image_model", *fields(FluxParams))}
    network = Flux(**settings, device="meta", operations=comfy.ops.manual_cast)
    shapes = {f"{prefix}{key}": tensor.to(dtype) for key, tensor in network.state_dict().items()}
    monkeypatch.setattr(module, "_shapes", lambda path: shapes)
    return outline(tmp_path / "flux.safetensors")


def test_a_file_in_fp8_is_planned_as_that(monkeypatch, tmp_path):
    small, plain = (flux(monkeypatch, tmp_path, "", dtype) for dtype in (torch.float8_e4m3fn, torch.bfloat16))
    sizes = [weight_bytes(d.specs, d.family.blocks, "resident", torch.bfloat16) for d in (small, plain)]
    assert sizes[0] == sizes[1] / 2
    batch = outlined_batch(small, 1, 256, 256)
    adapted = select(small.specs, small.family, AdapterConfig())
    found = [
        estimate_step(d, adapted, AdapterConfig(), batch, "none", torch.bfloat16) for d in (small, plain)
    ]
    assert found[0] == found[1]


def test_flux_is_planned_at_its_real_width(monkeypatch, tmp_path):
    denoiser = flux(monkeypatch, tmp_path)
    adapted = select(denoiser.specs, denoiser.family, AdapterConfig())
    batch = outlined_batch(denoiser, 1, 1024, 1024)
    plain, selective, block = (
        estimate_step(denoiser, adapted, AdapterConfig(), batch, mode, torch.bfloat16)
        for mode in ("none", "selective", "block")
    )
    assert block.saved <= 0.35 * plain.saved and selective.saved <= 0.6 * plain.saved
    assert selective.flops <= 1.25 * plain.flops and block.flops <= 1.6 * plain.flops


def test_the_command_prints_every_plan(tmp_path, capsys, tiny_captions):
    weights = state_dict(FILES["sd3"][0]())
    path = tmp_path / "sd3.safetensors"
    save_file({f"model.diffusion_model.{name}": t.contiguous() for name, t in weights.items()}, path)
    assert main(["plan", str(path), "--card", "24GB", "--resolution", "64", "--rank", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith("SD3, 64 pixels, batch 1, lora of rank 4") and len(lines) == 2 + len(STORES) * 4
    )
    assert all("  fits" in line for line in lines[2:]) and "fits, reads " in lines[-1]
    assert main(["plan", str(path), "--card", "0.001GB", "--resolution", "64", "--tflops", "100"]) == 0
    assert "too large" in (text := capsys.readouterr().out) and " s " in text


def test_a_file_that_is_no_base_model_is_refused_by_name(tmp_path, capsys):
    path = tmp_path / "lora.safetensors"
    save_file({"a.lora_up.weight": torch.zeros(4, 4)}, path)
    assert main(["plan", str(path)]) == 2
    assert "lora.safetensors: not a base model" in capsys.readouterr().err


def test_sizes_are_read_as_people_write_them():
    assert read_memory("24GB") == read_memory("24 GiB") == read_memory("24") == 24 << 30
    assert read_size("1024") == (1024, 1024) and read_size("832x1216") == (832, 1216)
    for wrong in ("", "much", "0GB"):
        with pytest.raises(ValueError, match="write for example 24GB"):
            read_memory(wrong)
    with pytest.raises(ValueError, match="write for example 1024 or 832x1216"):
        read_size("32")
