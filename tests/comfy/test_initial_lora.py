"""Files in the layouts that ComfyUI's loader reads start training at what that loader renders."""

from __future__ import annotations

import dataclasses

import comfy.lora
import comfy.sd
import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.tests.support.tiny_clips import CONFIG as WITH_TEXT
from graft.tests.support.tiny_clips import tiny
from graft.tests.support.tiny_sd3 import Noise, sd3_state_dict
from graft.training.adapters.build import restore_adapters
from graft.training.comfy.model.denoiser import ComfyDenoiser
from graft.training.config import AdapterConfig, TrainConfig
from graft.training.family import is_text
from graft.training.files.lora.diffusers import diffusers_tensors
from graft.training.files.lora.initial_weights import build_initial_weights, config_from_file, match_layers
from graft.training.files.lora.read import read_lora
from graft.training.files.lora.write import lora_tensors
from graft.training.loop import initial_state, train
from graft.training.state import TrainState

from ..support.tiny_clips import clip_of


@pytest.fixture(scope="module")
def patcher():
    return comfy.sd.load_diffusion_model_state_dict(sd3_state_dict())


def rendered(patcher, tensors):
    """The difference that the stock loader makes to each weight."""
    keys = comfy.lora.model_lora_keys_unet(patcher.model, {})
    weights, found = patcher.model.state_dict(), {}
    for target, patch in comfy.lora.load_lora(dict(tensors), keys, log_missing=False).items():
        key, offset = (target, None) if isinstance(target, str) else (target[0], target[1])
        weight = found.setdefault(key, torch.zeros_like(weights[key], dtype=torch.float32))
        comfy.lora.calculate_weight([(1.0, patch, 1.0, offset, None)], weight, key)
    return found


def lora(name, out, wide, rank=2, spelling=("lora_A.weight", "lora_B.weight")):
    down, up = torch.randn(rank, wide), torch.randn(out, rank)
    return {f"{name}.{spelling[0]}": down, f"{name}.{spelling[1]}": up}


LAYOUTS = {
    "kohya": lambda: {
        **lora(
            "lora_unet_joint_blocks_0_x_block_attn_qkv", 384, 128, 4, ("lora_down.weight", "lora_up.weight")
        ),
        "lora_unet_joint_blocks_0_x_block_attn_qkv.alpha": torch.tensor(1.0),
    },
    "native": lambda: lora("diffusion_model.joint_blocks.1.x_block.mlp.fc1", 512, 128),
    "diffusers, split": lambda: {
        key: tensor
        for part in ("to_q", "to_k", "to_v", "to_out.0")
        for key, tensor in lora(f"transformer.transformer_blocks.0.attn.{part}", 128, 128).items()
    },
    "diffusers, one of three": lambda: lora("transformer.transformer_blocks.0.attn.to_k", 128, 128),
    "onetrainer": lambda: lora(
        "lora_transformer_transformer_blocks_0_attn_to_q", 128, 128, 3, ("lora_down.weight", "lora_up.weight")
    ),
    "peft": lambda: lora("base_model.model.transformer_blocks.0.ff.net.0.proj", 512, 128),
}


@pytest.mark.feature(97, 98)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, torch.float32) for layout in LAYOUTS),
        *(("kohya", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)),
    ],
)
def test_a_file_starts_at_what_the_stock_loader_renders(tmp_path, patcher, layout, dtype):
    torch.manual_seed(0)
    tensors = {name: tensor.to(dtype) for name, tensor in LAYOUTS[layout]().items()}
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path)
    denoiser = ComfyDenoiser(patcher)
    matched = match_layers(read_lora(path), denoiser.specs, denoiser.family)
    config = config_from_file(matched, denoiser.specs, AdapterConfig())
    weights = build_initial_weights(matched, denoiser.specs, denoiser.family, config)
    adapters = restore_adapters(denoiser.specs, config, weights, torch.device("cpu"))
    expected = rendered(patcher, tensors)
    assert expected
    for path, adapter in adapters.items():
        target = expected.pop(f"diffusion_model.{path}.weight", torch.zeros(()))
        assert torch.allclose(adapter.product(), target.expand(adapter.spec.shape), atol=1e-5), path
    assert not expected


def test_a_file_written_by_diffusers_starts_training_and_trains_on(tmp_path, patcher):
    diffusers, peft = pytest.importorskip("diffusers"), pytest.importorskip("peft")
    network = diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=16,
        num_layers=2,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=4096,
        caption_projection_dim=128,
        pooled_projection_dim=2048,
        out_channels=16,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    targets = ["to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj", "ff.net.0.proj"]
    network.add_adapter(peft.LoraConfig(r=3, lora_alpha=3, target_modules=targets))
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    diffusers.StableDiffusion3Pipeline.save_lora_weights(
        tmp_path, transformer_lora_layers=peft.get_peft_model_state_dict(network)
    )
    path = tmp_path / "pytorch_lora_weights.safetensors"
    tensors, denoiser = load_file(path), ComfyDenoiser(patcher)
    matched = match_layers(read_lora(path), denoiser.specs, denoiser.family)
    assert not matched.left_out
    config = config_from_file(matched, denoiser.specs, AdapterConfig())
    weights = build_initial_weights(matched, denoiser.specs, denoiser.family, config)
    adapters = restore_adapters(denoiser.specs, config, weights, torch.device("cpu"))
    expected = rendered(patcher, tensors)
    for key, difference in expected.items():
        found = adapters[key.removeprefix("diffusion_model.").removesuffix(".weight")].product()
        assert torch.allclose(found, difference, atol=1e-5), key
    assert len(expected) == 10
    start = TrainState(0, config, denoiser.fingerprint, weights)
    state = train(denoiser, Noise(), TrainConfig(adapter=config), start, steps=2)
    assert state.step == 2 and all(state.weights[name].isfinite().all() for name in state.weights)


@pytest.mark.parametrize(
    ("name", "write"), [("sdxl", lora_tensors), ("sd35m", lora_tensors), ("sd35m", diffusers_tensors)]
)  # the tiny SDXL has other levels than the one that diffusers' names are for
def test_a_file_with_text_encoders_starts_where_it_was_saved(tmp_path, name, write):
    patcher, clip = tiny(name)(), clip_of(name)
    denoiser = ComfyDenoiser(patcher, clip)
    fresh = initial_state(denoiser, WITH_TEXT)
    saved = {key: tensor + 0.1 * torch.randn_like(tensor) for key, tensor in fresh.weights.items()}
    state = dataclasses.replace(fresh, weights=saved)
    path = tmp_path / "lora.safetensors"
    save_file(write(state, denoiser.family, torch.float32), path)
    specs, family = denoiser.specs, denoiser.family
    matched = match_layers(read_lora(path), specs, family)
    assert not matched.left_out
    weights = build_initial_weights(matched, specs, family, WITH_TEXT.adapter)
    cpu = torch.device("cpu")
    before, after = (restore_adapters(specs, WITH_TEXT.adapter, w, cpu) for w in (saved, weights))
    assert before.keys() == after.keys() and any(is_text(path) for path in after)
    assert all(torch.allclose(after[path].product(), before[path].product(), atol=1e-5) for path in before)
