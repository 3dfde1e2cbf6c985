"""What ComfyUI knows of the device that a model computes on: its number formats, and what memory is free."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch

from ..memory import usage


def dtypes_of(model_config: Any, device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the formats that a model can be computed in, first the one to choose for `device`.

    That is bf16 where ComfyUI takes it there (older cards emulate it), else fp16 if model and card can, else
    float32. A model's configuration says whether it overflows in fp16; ComfyUI computes it in float32 then.
    """
    management: Any = comfy.model_management
    known = getattr(model_config, "supported_inference_dtypes", (torch.float16,))
    half = [torch.float16] if torch.float16 in known else []
    if device.type not in ("cuda", "xpu"):
        return (torch.float32, torch.bfloat16, *half)
    if management.should_use_bf16(device):
        return (torch.bfloat16, torch.float32, *half)
    if half and management.should_use_fp16(device):
        return (torch.float16, torch.bfloat16, torch.float32)
    return (torch.float32, torch.bfloat16, *half)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of `device` that are free, but for those that ComfyUI leaves to other programs
    (--reserve-vram); None where nobody knows. The host's memory has a reserve of its own.
    """
    free = usage.free_bytes(device)
    if free is None or device.type == "cpu":
        return free
    return max(0, free - int(comfy.model_management.extra_reserved_memory()))
