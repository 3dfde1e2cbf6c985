"""What a device has of memory, and what a run takes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .tensor_counter import LiveTensors

COUNTED = ("cuda", "xpu")
"""Devices whose allocator counts the bytes that tensors take."""


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that tensors took on `device` since `reset_peak`; 0 where nobody counts."""
    if device.type in COUNTED:
        return int(torch.get_device_module(device).max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return 0


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from here on, not since the process began."""
    if device.type in COUNTED:
        torch.get_device_module(device).reset_peak_memory_stats(device)


def bytes_in_use(device: torch.device) -> int:
    """Return how many bytes this process's tensors take on `device`; 0 where that is not counted."""
    return int(torch.get_device_module(device).memory_allocated(device)) if device.type in COUNTED else 0


@contextmanager
def limit_memory(most: int | None, device: torch.device) -> Iterator[None]:
    """Let an allocation fail that would bring the process beyond `most` bytes.

    Windows would move to host memory what a card has no room for; every step would take ten times as long.
    PyTorch knows no way back to no limit: where there was none, it is all of the card afterwards.
    """
    if most is None or device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    # No limit is more than 1 under cudaMallocAsync, which ComfyUI prefers, and is refused when it is set.
    limit = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)  # from 2.6 on
    before = min(1.0, limit(device))
    torch.cuda.set_per_process_memory_fraction(min(before, most / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


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


def measure_peak(compute: Callable[[], None], device: torch.device) -> int:
    """Return the most bytes of tensors that `compute` has on `device` at once, beside those there before."""
    if device.type in COUNTED:
        synchronize(device)
        reset_peak(device)
        before = bytes_in_use(device)
        compute()
        synchronize(device)
        return peak_bytes(device) - before
    with LiveTensors() as live:
        compute()
    return int(live.peak)


def synchronize(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type in ("cuda", "xpu", "mps"):
        torch.get_device_module(device).synchronize()
