"""Errors that mean a device ran out of memory. `placement.py` decides what to do then."""

from __future__ import annotations

import torch

MESSAGES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",
    "cudnn_status_alloc_failed",
    "allocation_failed",
    "unable to find an engine to execute this computation",
)
"""Lower-case messages of allocators without an exception of their own: the CPU's, libraries', older devices'.
The last one is PyTorch's for a convolution: it silently skips every cuDNN engine that gets no workspace
(pytorch issue 108645)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on any device."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in MESSAGES)
