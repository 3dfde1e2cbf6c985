"""A checkpoint, a fine-tuned copy of it, and LoRA files for it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from graft.training.files.lora.read import LoraFile, read_lora

PREFIX = "model.diffusion_model."
SHAPES = {
    f"{PREFIX}blocks.0.attn.qkv": (24, 8),
    f"{PREFIX}blocks.1.mlp.0": (16, 8),
    f"{PREFIX}conv_in": (8, 4, 3, 3),
    "conditioner.embedders.0.transformer.text_model.encoder.layers.0.mlp.fc1": (12, 6),
}
NAMES = {
    f"{PREFIX}blocks.0.attn.qkv": "lora_unet_blocks_0_attn_qkv",
    f"{PREFIX}blocks.1.mlp.0": "lora_unet_blocks_1_mlp_0",
    f"{PREFIX}conv_in": "lora_unet_conv_in",
    "conditioner.embedders.0.transformer.text_model.encoder.layers.0.mlp.fc1": (
        "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    ),
}


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"{key}.weight": torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
    weights[f"{PREFIX}blocks.0.norm.weight"] = torch.ones(8)
    weights[f"{PREFIX}blocks.0.attn.qkv.bias"] = torch.zeros(24)
    weights["first_stage_model.conv.weight"] = torch.randn(4, 4, generator=generator)
    return weights


def lora_tensors(rank: int = 4, alpha: float = 2.0, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, shape in SHAPES.items():
        name, kernel = NAMES[key], (1,) * (len(shape) - 2)
        tensors[f"{name}.lora_down.weight"] = torch.randn(rank, *shape[1:], generator=generator)
        tensors[f"{name}.lora_up.weight"] = torch.randn(shape[0], rank, *kernel, generator=generator)
        tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


def lora_file(
    folder: Path, tensors: dict[str, Tensor] | None = None, name: str = "lora", **metadata: str
) -> LoraFile:
    return read_lora(lora_path(folder, tensors, name, **metadata))


def lora_path(
    folder: Path, tensors: dict[str, Tensor] | None = None, name: str = "lora", **metadata: str
) -> Path:
    path = folder / f"{name}.safetensors"
    save_file(lora_tensors() if tensors is None else tensors, path, metadata or None)
    return path


def weight_differences(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What kohya tensors add to each of the checkpoint's weights."""
    found = {}
    for key, name in NAMES.items():
        up, down = tensors[f"{name}.lora_up.weight"].float(), tensors[f"{name}.lora_down.weight"].float()
        product = up.flatten(1) @ down.flatten(1) * float(tensors[f"{name}.alpha"]) / down.shape[0]
        found[f"{key}.weight"] = product.reshape(SHAPES[key])
    return found
