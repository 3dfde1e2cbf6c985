"""What ComfyUI calls things in which version: the one place that knows (0.3.75 to 0.33)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import comfy.model_management

try:
    from comfy.quant_ops import QuantizedTensor
except ImportError:  # before mixed-precision checkpoints

    class QuantizedTensor:  # type: ignore[no-redef]
        """Stands in where ComfyUI has no quantised tensors, so that isinstance is False."""


def running_server() -> Any:
    """Return ComfyUI's PromptServer, or None where nodes are executed without one."""
    module = sys.modules.get("server")  # importing it would pull in the web server where there is none
    return getattr(getattr(module, "PromptServer", None), "instance", None)


@contextlib.contextmanager
def training_mode() -> Iterator[None]:
    """Tell ComfyUI to leave out kernels that have no backward, where it has that switch."""
    management: Any = comfy.model_management
    before = getattr(management, "in_training", None)
    if before is not None:
        management.in_training = True
    try:
        yield
    finally:
        if before is not None:
            management.in_training = before


__all__ = ["QuantizedTensor", "running_server", "training_mode"]
