"""What LoRA files call a ComfyUI model's layers, from ComfyUI's own table: we read what its loader reads."""

from __future__ import annotations

from typing import Any

import comfy.lora

from ..family import TEXT
from .denoiser import NETWORK


def lora_names(patcher: Any, clip: Any = None) -> dict[str, tuple[str, int, int]]:
    """Return `lora_file.start.layer_names` of this model, for every layout that ComfyUI's loader knows.

    With `clip`, those of its text encoders too. Names for which the loader reorders the outputs (a diffusers
    norm's shift and scale) are left out.
    """
    weights = patcher.model.state_dict()
    names: dict[str, tuple[str, int, int]] = {}
    for name, target in comfy.lora.model_lora_keys_unet(patcher.model, {}).items():
        key, rows = (target, None) if isinstance(target, str) else (target[0], target[1])
        if (
            not key.endswith(".weight")
            or key not in weights
            or (not isinstance(target, str) and len(target) > 2)
        ):
            continue
        axis, start, count = rows or (0, 0, weights[key].shape[0])
        if axis == 0:
            names[name] = (key.removeprefix(f"{NETWORK}.").removesuffix(".weight"), start, count)
    if clip is not None:
        model = clip.cond_stage_model
        weights = model.state_dict()
        for name, key in comfy.lora.model_lora_keys_clip(model, {}).items():
            names[name] = (TEXT + key.removesuffix(".weight"), 0, weights[key].shape[0])
    return names
