"""LoRA files: kohya keys, `.alpha` always written, metadata that says what the file is.

Keys are `<prefix><module path with underscores>.<suffix>`, which every ComfyUI reads; a family without the
prefix is written with native `diffusion_model.<module path>.<suffix>` keys.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .adapters import for_layer, method_of
from .config import to_dict
from .family import Family
from .state import TrainState


def lora_tensors(state: TrainState, family: Family, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the file's tensors: the adapter's in `dtype`, and for each layer `.alpha` as a 0-d float32."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.weights.items():
        path, parameter = name.rsplit(".", 1)
        layers.setdefault(path, {})[parameter] = tensor
    tensors: dict[str, Tensor] = {}
    for path, weights in layers.items():
        config = for_layer(state.adapter, path)
        for suffix, tensor in method_of(config).file_tensors(weights, config).items():
            stored = tensor.float() if suffix == "alpha" else tensor.to(dtype)
            tensors[f"{lora_key(path, family)}.{suffix}"] = stored.contiguous()
    return tensors


def lora_key(path: str, family: Family) -> str:
    """Return the file's name for the layer at a module path of the diffusion model."""
    return family.key_prefix + path.replace(".", "_") if family.key_prefix else f"diffusion_model.{path}"


def lora_metadata(state: TrainState, family: Family, *, title: str, **extra: Any) -> dict[str, str]:
    """Return the safetensors metadata; `extra` holds further entries, anything but strings as JSON."""
    values: dict[str, Any] = {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{family.architecture}/lora",
        "modelspec.title": title,
        "ss_base_model_version": family.base_model,
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(state.adapter.rank),
        "ss_network_alpha": str(state.adapter.effective_alpha),
        "ss_steps": str(state.step),
        "graft_base": state.base,
        "graft_adapter": to_dict(state.adapter),
        **extra,
    }
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items() if v is not None}


def write_lora(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a LoRA file whole or not at all: under a temporary name beside it, flushed, then renamed.

    Raises OSError when the folder cannot be written or the disk is full; a file that was there is then
    untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        save_file(dict(tensors), temporary, metadata=dict(metadata))
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
