"""ComfyUI's view of a compute device: the dtypes to use there and the free memory."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch

from ...memory import device_memory


def supported_dtypes(model_config: Any, device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a model can be computed in, the best one for `device` first.

    On a GPU the best is bf16 if ComfyUI uses it there (older GPUs emulate it), else fp16 if ComfyUI uses it
    and the model's configuration lists it (some models overflow in fp16), else float32.
    """
    management: Any = comfy.model_management
    listed = getattr(model_config, "supported_inference_dtypes", (torch.float16,))
    supported = [torch.float32, torch.bfloat16, *({torch.float16} & set(listed))]
    best = torch.float32
    if device.type in ("cuda", "xpu"):
        if management.should_use_bf16(device):
            best = torch.bfloat16
        elif torch.float16 in supported and management.should_use_fp16(device):
            best = torch.float16
    return (best, *(dtype for dtype in supported if dtype != best))


def usable_bytes(device: torch.device) -> int:
    """Return what `free_bytes` is once ComfyUI's models are unloaded; the device's size if unknown."""
    management: Any = comfy.model_management
    free = free_bytes(device)
    if free is None:
        return int(management.get_total_memory(device))
    return free + sum(
        int(model.model_loaded_memory())
        for model in management.current_loaded_models
        if model.device == device
    )


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of `device`, less what ComfyUI reserves for other programs (--reserve-vram); None
    if unknown. Host memory has its own reserve.
    """
    free = device_memory.free_bytes(device)
    if free is None or device.type == "cpu":
        return free
    return max(0, free - int(comfy.model_management.extra_reserved_memory()))
