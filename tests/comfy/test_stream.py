"""A base may stay in its file: the same training, with host memory for little more than a block."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import folder_paths
import pytest
import torch
from safetensors.torch import save_file

from graft.commands.bench.base_models import BaseModel, _mmdit, build
from graft.tests.support import dynamic_vram, streamed
from graft.tests.support.card import DEVICE
from graft.training.comfy.model import file_weights, loading
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.job.graph import FROM_CHECKPOINT
from graft.training.user_error import UserError

pytestmark = dynamic_vram.is_off("there, ComfyUI itself leaves weights in their files")


def model(depth):
    """Return a base of SD3's class with a small table of positions."""
    settings = _mmdit(depth, num_patches=32**2, pos_embed_max_size=32)
    return BaseModel("SD3", settings, (16, 16, 16), 8, 4096, 2048)


def write(path, depth, dtype=torch.bfloat16):
    """Write a base as a diffusion model that ComfyUI detects; return its bytes."""
    network = build(model(depth), dtype).model.diffusion_model
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, path)
    return path.stat().st_size


@pytest.fixture
def folder(base):
    folder = base / "models" / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def load(name, *, stay_in_file, dtype="auto"):
    folder_paths.filename_list_cache.clear()
    return loading.load_base(name, (), FROM_CHECKPOINT, dtype, stay_in_file=stay_in_file)[0]


@pytest.mark.feature(151)
@pytest.mark.skipif(
    DEVICE != "cpu" or sys.platform != "linux", reason="reads /proc and sets a limit of Linux"
)
def test_a_base_of_200_mb_trains_with_120_mb_of_memory_as_if_there_were_ample(folder):
    assert write(folder / "large.safetensors", 9) >= 200e6
    command = [sys.executable, streamed.__file__, str(folder / "large.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["anonymous"] <= streamed.LIMIT and report["mapped"] <= streamed.LIMIT
    assert "allocate" in report["copied"], "under the same limit, a copy of the base does not fit"
    ample = streamed.train_two_steps(load("large.safetensors", stay_in_file=False, dtype="bf16"), "resident")
    assert report["limited"] == ample == {name: report[name] for name in ample}


def test_a_copied_base_moves_into_its_file_when_it_is_streamed(folder, caplog):
    write(folder / "small.safetensors", 2)
    expected = streamed.train_two_steps(load("small.safetensors", stay_in_file=True), "resident")
    patcher = load("small.safetensors", stay_in_file=False, dtype="bf16")
    network = patcher.model.diffusion_model
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    assert streamed.train_two_steps(patcher, "stream") == expected
    mapped = file_weights.mapped_file(network)
    assert all(mapped.has(parameter) for parameter in network.parameters()) and not caplog.text
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_a_base_in_another_dtype_than_its_file_is_streamed_from_memory_and_the_user_told(folder, caplog):
    write(folder / "wide.safetensors", 2)
    expected = streamed.train_two_steps(
        load("wide.safetensors", stay_in_file=False, dtype="fp32"), "resident"
    )
    patcher = load("wide.safetensors", stay_in_file=False, dtype="fp32")
    assert streamed.train_two_steps(patcher, "stream") == expected
    assert "GiB of the base are in host memory" in caplog.text and "own dtype" in caplog.text


def test_a_base_of_another_loader_is_streamed_from_memory_and_the_user_told(caplog):
    patcher = build(model(2), torch.bfloat16)
    expected = streamed.train_two_steps(patcher, "resident")
    assert streamed.train_two_steps(patcher, "stream") == expected
    assert "Load the file with Load Base Model" in caplog.text


@pytest.mark.parametrize("stay_in_file", [True, False])
def test_a_file_that_changed_is_refused(folder, stay_in_file):
    path = folder / "changing.safetensors"
    write(path, 2)
    patcher = load(path.name, stay_in_file=stay_in_file, dtype="bf16")
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"changing\.safetensors.*was changed.*queue again"):
        streamed.train_two_steps(patcher, "stream")


def test_a_file_that_changes_during_a_step_ends_the_run(folder):
    path = folder / "removed.safetensors"
    write(path, 2)
    denoiser = ComfyDenoiser(load(path.name, stay_in_file=True))
    first, other = "joint_blocks.0.x_block.attn.qkv", "joint_blocks.1.x_block.attn.qkv"
    with denoiser.hold(torch.bfloat16, "stream") as base:
        base.layers[first].weight(torch.bfloat16, denoiser.device)
        path.rename(folder / "elsewhere.safetensors")
        with pytest.raises(UserError, match="changed or removed"):
            base.layers[other].weight(torch.bfloat16, denoiser.device)


@pytest.mark.feature(106)
def test_a_file_larger_than_free_memory_is_mapped_unasked(folder, monkeypatch, caplog):
    caplog.set_level("INFO")
    size = write(folder / "huge.safetensors", 2)
    monkeypatch.setattr(file_weights, "free_bytes", lambda device: size)
    patcher = load("huge.safetensors", stay_in_file=None)
    assert ComfyDenoiser(patcher).is_mapped and "stays in its file" in caplog.text
    monkeypatch.setattr(file_weights, "free_bytes", lambda device: 2 * size)
    assert not ComfyDenoiser(load("huge.safetensors", stay_in_file=None)).is_mapped


def test_a_mapped_base_samples_as_a_copied_one_and_writes_do_not_reach_the_file(folder):
    path = folder / "drawn.safetensors"
    write(path, 2)
    content = path.read_bytes()
    mapped, copied = (load(path.name, stay_in_file=stay, dtype="bf16") for stay in (True, False))
    same = zip(mapped.model.state_dict().items(), copied.model.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in same)
    with torch.inference_mode():
        next(mapped.model.diffusion_model.parameters()).fill_(1)
    assert path.read_bytes() == content
