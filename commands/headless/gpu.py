"""The choice of the GPU that a process computes on."""

from __future__ import annotations

import os

from ...training.user_error import UserError

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""NVIDIA's variable, and AMD's, which wins there when both are set."""


def choose_gpu(index: int) -> None:
    """Let this process, and those it starts, see one GPU: number `index`, from 0, of those it was given.

    Raises UserError when there are fewer. Call it before anything touches a GPU.
    """
    value = next((os.environ[name] for name in VISIBLE if name in os.environ), None)
    visible = [gpu for gpu in value.split(",") if gpu] if value is not None else None
    if visible == []:
        return  # all of them are hidden
    if visible and index >= len(visible):
        raise UserError(
            f"GPU {index} was asked for, but only {len(visible)} can be seen (CUDA_VISIBLE_DEVICES, or "
            f"ComfyUI's --cuda-device): choose one from 0 to {len(visible) - 1}, or start fewer processes."
        )
    for name in VISIBLE:
        os.environ[name] = visible[index] if visible else str(index)
