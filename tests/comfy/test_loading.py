"""Load Base Model: files that are what they claim to be, and files that are not."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from pathlib import Path

import comfy.supported_models
import pytest
import torch
from safetensors.torch import load_file, save_file

import graft
from graft.starter import in_comfyui as embedded
from graft.training.comfy.model import loading
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.user_error import UserError

BASE = Path(graft.__file__).parent / "starter" / "base" / "graft_tiny_sd3.safetensors"


@pytest.fixture
def checkpoints(base):
    folder = base / "models" / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def raw(header, body=b""):
    data = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(data)) + data + body


def entry(first, last):
    return {"dtype": "F32", "shape": [(last - first) // 4], "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pickle.ckpt", b"\x80\x04", "only .safetensors"),
        ("empty.safetensors", b"", "not a safetensors file"),
        ("cut.safetensors", raw({"a": entry(0, 8)}, b"1234"), "the file is cut off"),
        ("overlap.safetensors", raw({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "overlap"),
        ("huge.safetensors", struct.pack("<Q", 1 << 40) + b"{}", "not a safetensors file"),
        ("nested.safetensors", raw(b'{"a":' * 100_000), "damaged"),
        ("text.safetensors", raw(b"{not json!"), "damaged"),
        ("other.safetensors", raw({"a": entry(0, 8)}, bytes(8)), r"recognizes|cannot load.*\S\); choose"),
        ("list.safetensors", raw(b'["a"]'), "not a safetensors file"),
    ],
)
def test_a_file_that_is_no_base_model_is_refused_by_name(checkpoints, name, content, message):
    (checkpoints / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        loading.load_base(name, [], loading.FROM_CHECKPOINT, "auto")
    assert name in str(error.value)


def test_a_missing_file_is_refused_with_the_folders_it_belongs_in(checkpoints):
    with pytest.raises(ValueError, match="models/checkpoints or models/diffusion_models"):
        loading.load_base("nowhere.safetensors", [], loading.FROM_CHECKPOINT, "auto")


def test_separate_files_load_as_the_checkpoint_does(base, checkpoints):
    tensors = load_file(BASE)
    for kind, prefix in (("diffusion_models", "model.diffusion_model."), ("vae", "first_stage_model.")):
        (base / "models" / kind).mkdir(parents=True, exist_ok=True)
        part = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        save_file(part, base / "models" / kind / f"tiny_{kind}.safetensors")
    model, clip, vae = loading.load_base(
        "tiny_diffusion_models.safetensors", [], "tiny_vae.safetensors", "auto"
    )
    whole, _, whole_vae = loading.load_base(_copied(checkpoints), [], loading.FROM_CHECKPOINT, "auto")
    ours, theirs = model.model.diffusion_model.state_dict(), whole.model.diffusion_model.state_dict()
    assert clip is None and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert vae.first_stage_model is not None and whole_vae.first_stage_model is not None


@pytest.mark.parametrize(
    ("config", "kind"),
    [("SDXL", "STABLE_DIFFUSION"), ("FluxInpaint", "FLUX"), ("ZImage", "LUMINA2"), ("WAN21_I2V", "WAN")],
)
def test_text_encoder_files_are_loaded_as_the_models_own(config, kind):
    assert loading.clip_type(getattr(comfy.supported_models, config)).name == kind


def test_text_encoder_files_of_a_type_that_this_comfyui_lacks_are_told_by_their_weights():
    newer = type("Flux2", (comfy.supported_models.Flux,), {})
    assert loading.clip_type(newer).name in ("FLUX2", "STABLE_DIFFUSION")


def test_text_encoder_files_of_unknown_models_are_refused_by_name():
    with pytest.raises(ValueError, match="SVD_img2vid.*'from checkpoint'"):
        loading.clip_type(comfy.supported_models.SVD_img2vid)


def test_the_chosen_dtype_is_the_one_the_weights_have(checkpoints):
    path = "joint_blocks.0.x_block.attn.qkv"
    in_file = load_file(BASE)[f"model.diffusion_model.{path}.weight"]
    model, _, _ = loading.load_base(_copied(checkpoints), [], loading.FROM_CHECKPOINT, "bf16")
    with ComfyDenoiser(model).hold(torch.float32) as base:
        weight = base.layers[path].weight(torch.float32, torch.device("cpu")).cpu()
    assert torch.equal(weight, in_file.to(torch.bfloat16).float()) and not torch.equal(
        weight, in_file.float()
    )


def _copied(checkpoints):
    target = checkpoints / "copied.safetensors"
    target.write_bytes(BASE.read_bytes())
    return target.name


def test_a_file_is_read_ahead_only_while_it_is_loaded(tmp_path):
    path = tmp_path / "large.safetensors"
    path.write_bytes(b"x" * (3 << 24))

    def sweeping():
        return [thread for thread in threading.enumerate() if thread.name == "graft read-ahead"]

    with pytest.raises(ValueError, match="broken"), loading.read_ahead(path):
        raise ValueError("broken")
    assert not sweeping()
    with loading.read_ahead(tmp_path / "vanished.safetensors"):
        pass
    assert not sweeping()


def test_the_demos_text_encoder_comes_with_its_base_and_with_no_full_size_model(checkpoints, monkeypatch):
    embedded.register()
    assert embedded.with_text_encoder(embedded.BASE_MODEL, []) == [embedded.TEXT_ENCODER]
    (checkpoints / "large.safetensors").touch()
    assert embedded.with_text_encoder("large.safetensors", []) == []
    monkeypatch.setattr(embedded, "LARGEST_BASE", -1)
    with pytest.raises(ValueError, match="belongs to .*, not to large.* 'from checkpoint'"):
        embedded.with_text_encoder("large.safetensors", [embedded.TEXT_ENCODER])


def test_an_old_pytorch_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1+cu121")
    with pytest.raises(UserError, match=r"Graft needs PyTorch 2\.5 or newer, and this is 2\.4\.1\+cu121"):
        asyncio.run(graft.comfy_entrypoint())


def test_the_demos_text_encoder_goes_where_it_can_be_written_else_all_is_named(tmp_path, monkeypatch):
    closed, open_, own = tmp_path / "closed", tmp_path / "open", tmp_path / "own"
    for folder in (closed, open_, own):
        folder.mkdir()
    written, full = [], []

    def write(path):
        if path.parent in (closed, *full):
            raise OSError(30, "Read-only file system", str(path))
        written.append(path.parent)

    folders = [str(tmp_path / "missing"), str(closed), str(open_)]
    monkeypatch.setattr(embedded.folder_paths, "get_folder_paths", lambda kind: folders)
    monkeypatch.setattr(embedded.folder_paths, "get_full_path", lambda kind, name: None)
    monkeypatch.setattr(embedded, "model_path", lambda model: BASE)
    monkeypatch.setattr(embedded, "BASE", own)
    monkeypatch.setattr(embedded, "write_clip_l", write)
    assert embedded.with_text_encoder(embedded.BASE_MODEL, []) == [embedded.TEXT_ENCODER]
    full.append(open_)
    embedded.with_text_encoder(embedded.BASE_MODEL, [])
    assert written == [open_, own]
    full.append(own)
    with pytest.raises(ValueError, match="make one of them writable") as error:
        embedded.with_text_encoder(embedded.BASE_MODEL, [])
    assert all(str(folder) in str(error.value) for folder in (closed, open_, own))
