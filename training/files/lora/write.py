"""The writing of a LoRA file: layers under names that every ComfyUI reads, factors, alpha, digests.

Keys are kohya's, `<prefix><module path with underscores>.<suffix>` and `.alpha`. A family without that prefix
has `diffusion_model.<module path>` before the suffixes; where diffusers knows it, plain LoRA is written as by
ai-toolkit, `lora_A.weight` and `lora_B.weight` with alpha in them, which ComfyUI and diffusers read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...adapters.build import for_layer, method_of
from ...config import AdapterConfig
from ...family import Family, is_text
from ...state import TrainState
from ..tensor_file import write_tensors
from .metadata import with_hashes
from .names import ARCHITECTURES, COMFY, spell, split_text_path
from .peft import ALPHA, is_plain, peft_tensors, shape_of
from .read import MAGNITUDE

EXACT = (ALPHA, MAGNITUDE)
"""Suffixes that stay float32: a number, and the lengths of the whole weight's columns, whose rounding error
in bf16 would be a fifth of a small difference."""


def lora_tensors(state: TrainState, family: Family, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the file's tensors in `dtype`; an `.alpha` is a 0-d float32."""
    tensors: dict[str, Tensor] = {}
    architecture = None if family.key_prefix else ARCHITECTURES.get(family.export)
    for path, values in lora_layers(state).items():
        if architecture is None or is_text(path) or not is_plain(values):
            key = lora_key(path, family)
            tensors |= {f"{key}.{suffix}": t for suffix, t in cast_tensors(values, dtype).items()}
        else:
            exact = {suffix: tensor.float() for suffix, tensor in values.items()}
            parts = architecture.native_parts(path, shape_of(values))
            tensors |= cast_tensors(peft_tensors(exact, parts, COMFY), dtype)
    return tensors


def lora_layers(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Return what a file holds for each layer: module path -> kohya's suffix -> tensor."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.weights.items():
        path, parameter = name.rsplit(".", 1)
        layers.setdefault(path, {})[parameter] = tensor
    return {path: layer_tensors(weights, for_layer(state.adapter, path)) for path, weights in layers.items()}


def layer_tensors(weights: Mapping[str, Tensor], config: AdapterConfig) -> dict[str, Tensor]:
    """Return one layer's factors and alpha by suffix, for `weights` by parameter name.

    Alpha is there wherever the method has one: without it loaders apply a LoRA at strength 1, whatever was
    trained.
    """
    method = method_of(config)
    if not method.has_alpha:
        return method.file_tensors(weights)
    alpha = method.ranks_in_file * method.effective_alpha(config)
    return {**method.file_tensors(weights), ALPHA: torch.tensor(alpha)}


def cast_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a layer's tensors by suffix as a file of this dtype holds them."""
    return {s: t.to(torch.float32 if s in EXACT else dtype).contiguous() for s, t in tensors.items()}


def lora_key(path: str, family: Family) -> str:
    """Return the file's name for the layer at a module path of the diffusion model or a text encoder."""
    if is_text(path):
        encoder, inner = split_text_path(path)
        return spell(family.text_encoders[encoder], inner)
    return spell(family.key_prefix or COMFY, path)


def write_lora(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Write a LoRA file; return its metadata, to which the digests of its own weights are added.

    Raises OSError as `write_tensors` does.
    """
    whole = with_hashes(tensors, metadata)
    write_tensors(path, tensors, whole)
    return whole
