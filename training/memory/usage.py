"""What a device has and what a run takes of it: memory, and operations a second."""

from __future__ import annotations

import math
import time

import torch


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that tensors have taken on `device` in this process; 0 where that is not
    counted."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "xpu":
        return int(torch.xpu.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return 0


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes tensors could still take on `device`; None where nobody knows."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    if device.type == "xpu" and hasattr(torch.xpu, "mem_get_info"):
        return int(torch.xpu.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return _free_on_host() if device.type == "cpu" else None


def _free_on_host() -> int | None:
    try:
        import psutil  # type: ignore[import-untyped]  # comes with ComfyUI
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


def operations_a_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations a second of a large matrix product, measured in a moment."""
    side = 1024 if device.type == "cpu" else 4096
    a = torch.ones(side, side, dtype=dtype, device=device)
    best = math.inf
    for _ in range(4):
        _wait(device)
        began = time.perf_counter()
        a @ a
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * side**3 / best


def _wait(device: torch.device) -> None:
    if device.type in ("cuda", "xpu", "mps"):
        torch.get_device_module(device).synchronize()
