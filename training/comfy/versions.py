"""What ComfyUI calls things in which version: the one place that knows (0.3.75 to 0.33)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import comfy.model_management
import comfy.ops
import torch
from torch.nn.attention import SDPBackend

from ..network.replace_forward import replaced

try:
    from comfy.quant_ops import QuantizedTensor
except ImportError:  # before mixed-precision checkpoints

    class QuantizedTensor:  # type: ignore[no-redef]
        """Stands in where ComfyUI has no quantized tensors, so that isinstance is False."""


def running_server() -> Any:
    """Return ComfyUI's PromptServer, or None where nodes are executed without one."""
    module = sys.modules.get("server")  # importing it would pull in the web server where there is none
    return getattr(getattr(module, "PromptServer", None), "instance", None)


@contextlib.contextmanager
def training_mode() -> Iterator[None]:
    """Tell ComfyUI to leave out kernels that have no backward, where it has that switch, take those that it
    uses nevertheless from plain PyTorch, and leave out cuDNN's attention, whose backward has given NaN
    (diffusers issue 9768, pytorch pull request 171627).

    Where ComfyUI was started with --deterministic, kernels that add in any order are refused, where it only
    warns: attention has a backward pass that adds in one order, and PyTorch takes it under this alone.
    """
    management: Any = comfy.model_management
    preferred: list[SDPBackend] = getattr(comfy.ops, "SDPA_BACKEND_PRIORITY", [])
    before, cudnn = list(preferred), torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with contextlib.ExitStack() as undo:
        undo.callback(preferred.__setitem__, slice(None), before)
        preferred[:] = [backend for backend in before if backend != SDPBackend.CUDNN_ATTENTION]
        undo.callback(torch.backends.cuda.enable_cudnn_sdp, cudnn)
        torch.backends.cuda.enable_cudnn_sdp(False)
        matmul = torch.backends.cuda.matmul
        if hasattr(matmul, "allow_fp16_accumulation"):  # ComfyUI's --fast: not for gradients
            undo.enter_context(replaced(matmul, "allow_fp16_accumulation", False))
        undo.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warns)
        torch.use_deterministic_algorithms(deterministic)
        # All memory would be written before it is used, that of copies to and from the host too.
        undo.enter_context(replaced(torch.utils.deterministic, "fill_uninitialized_memory", False))
        if hasattr(management, "in_training"):
            undo.enter_context(replaced(management, "in_training", True))
        for name, plain in plain_kernels().items():
            undo.enter_context(replaced(sys.modules["comfy_kitchen"], name, plain))
        yield


def reset_cast_buffers() -> None:
    """Free the buffers that newer versions cast weights into, and otherwise free when a node ends."""
    reset = getattr(comfy.model_management, "reset_cast_buffers", None)
    if reset is not None:
        reset()


def plain_kernels() -> dict[str, Callable[..., Any]]:
    """Return the functions of comfy_kitchen that networks call in training, as it has them in plain PyTorch:
    its operators have no backward. None where ComfyUI does without the package.

    Those whose name ends in "_" change their arguments, and no network calls them in training.
    """
    try:
        kitchen = import_module("comfy_kitchen")
        modules = [import_module(f"comfy_kitchen.backends.eager.{name}") for name in ("rope", "adaln")]
    except ImportError:
        return {}
    public = [name for name in kitchen.__all__ if not name.endswith("_")]
    return {name: vars(module)[name] for module in modules for name in public if name in vars(module)}


__all__ = ["QuantizedTensor", "reset_cast_buffers", "plain_kernels", "running_server", "training_mode"]
