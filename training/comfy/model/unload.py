"""Models at rest: with the weights that their files gave them, in host memory.

In a loaded model ComfyUI may have merged a LoRA into the weights that all its clones share, or cast small
ones. `unload_all_models` leaves alone those that it computes with on the CPU, often text encoders.
"""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch

from ..versions import reset_cast_buffers


def unload(*patchers: Any) -> None:
    """Unload every model of the compute devices, and those of the devices that the ModelPatchers load to.

    The ModelPatchers' own models are in host memory then, also where ComfyUI would leave them on the device
    (--highvram, --gpu-only) until it computes with them.
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
