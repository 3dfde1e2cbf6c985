"""How much memory a run takes, for people to read."""

from __future__ import annotations

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
