"""Unloading of models: back to host memory, with the weights of their files.

In a loaded model, ComfyUI may have merged a LoRA into the weights that all clones share, or cast small ones.
`unload_all_models` skips models that compute on the CPU, often text encoders.
"""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch

from ..versions import reset_cast_buffers


def unload(*patchers: Any) -> None:
    """Unload every model on the compute devices and on the devices that these ModelPatchers load to.

    The ModelPatchers' own models end up in host memory, even if ComfyUI keeps them on the device (--highvram,
    --gpu-only).
    """
    comfy.model_management.unload_all_models()
    for device in dict.fromkeys(patcher.load_device for patcher in patchers):
        comfy.model_management.free_memory(1e30, device)
    with torch.inference_mode():  # as ComfyUI moves them
        for patcher in patchers:
            if patcher.offload_device.type != "cpu":
                patcher.model.to("cpu")
    reset_cast_buffers()
    comfy.model_management.soft_empty_cache()


def is_loaded(patcher: Any) -> bool:
    """Return whether a ModelPatcher or a clone of it is loaded."""
    loaded = comfy.model_management.loaded_models()
    return any(patcher.is_clone(other) for other in loaded if other is not None)
