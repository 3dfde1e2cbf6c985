"""Differences between versions of ComfyUI (0.3.75 to 0.33), all in one place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from threading import RLock
from typing import Any

import comfy.model_management
import comfy.ops
import torch
from torch.nn.attention import SDPBackend

from ..frozen_base.replace_forward import replaced

try:
    from comfy.quant_ops import QuantizedTensor
except ImportError:  # before mixed-precision checkpoints

    class QuantizedTensor:  # type: ignore[no-redef]
        """Stands in where ComfyUI has no quantized tensors, so that isinstance is False."""


def quantized_layout(tensor: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a quantized tensor's layout, and the layout's parameters."""
    if hasattr(tensor, "_layout_cls"):
        return tensor._layout_cls, vars(tensor._params)
    return tensor._layout_type, tensor._layout_params  # before comfy-kitchen


def multiplies_fast(layout: str) -> bool:
    """Return whether comfy-kitchen multiplies weights of this layout on this machine's GPU."""
    from comfy.quant_ops import get_layout_class

    return bool(get_layout_class(layout).supports_fast_matmul())


_switches = RLock()
"""Held in `training_mode`, whose switches are the whole process's."""


def running_server() -> Any:
    """Return ComfyUI's PromptServer, or None where nodes are executed without one."""
    module = sys.modules.get("server")  # importing it would pull in the web server where there is none
    return getattr(getattr(module, "PromptServer", None), "instance", None)


def prompts_wait() -> bool:
    """Return whether ComfyUI is executing a prompt or has one in its queue."""
    server = running_server()
    return server is not None and server.prompt_queue.get_tasks_remaining() > 0


@contextlib.contextmanager
def training_mode() -> Iterator[None]:
    """Use only kernels that have a correct backward pass.

    Sets ComfyUI's own training switch if it has one, replaces remaining kernels without a backward pass by
    plain PyTorch, and leaves out cuDNN's attention, whose backward pass has returned NaN (diffusers issue
    9768, pytorch pull request 171627). One thread at a time: another waits here.

    Under --deterministic, nondeterministic kernels are errors, where ComfyUI only warns: only then does
    PyTorch choose the deterministic backward pass of attention.
    """
    management: Any = comfy.model_management
    preferred: list[SDPBackend] = getattr(comfy.ops, "SDPA_BACKEND_PRIORITY", [])
    with _switches, contextlib.ExitStack() as undo:
        before, cudnn = list(preferred), torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        deterministic = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        undo.callback(preferred.__setitem__, slice(None), before)
        preferred[:] = [backend for backend in before if backend != SDPBackend.CUDNN_ATTENTION]
        undo.callback(torch.backends.cuda.enable_cudnn_sdp, cudnn)
        torch.backends.cuda.enable_cudnn_sdp(False)
        matmul = torch.backends.cuda.matmul
        if hasattr(matmul, "allow_fp16_accumulation"):  # ComfyUI's --fast; too coarse for gradients
            undo.enter_context(replaced(matmul, "allow_fp16_accumulation", False))
        undo.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warns)
        torch.use_deterministic_algorithms(deterministic)
        # Otherwise PyTorch would fill all new memory first, buffers of copies to and from the host included.
        undo.enter_context(replaced(torch.utils.deterministic, "fill_uninitialized_memory", False))
        if hasattr(management, "in_training"):
            undo.enter_context(replaced(management, "in_training", True))
        for name, plain in plain_kernels().items():
            undo.enter_context(replaced(sys.modules["comfy_kitchen"], name, plain))
        yield


def reset_cast_buffers() -> None:
    """Free the buffers that newer versions cast weights into and keep until a node ends."""
    reset = getattr(comfy.model_management, "reset_cast_buffers", None)
    if reset is not None:
        reset()


def plain_kernels() -> dict[str, Callable[..., Any]]:
    """Return comfy_kitchen's plain PyTorch versions of the functions that networks call in training.

    Its operators have no backward pass. Empty if ComfyUI does without the package. Functions whose name ends
    in "_" work in place and are not called in training.
    """
    try:
        kitchen = import_module("comfy_kitchen")
        modules = [import_module(f"comfy_kitchen.backends.eager.{name}") for name in ("rope", "adaln")]
    except ImportError:
        return {}
    public = [name for name in kitchen.__all__ if not name.endswith("_")]
    return {name: vars(module)[name] for module in modules for name in public if name in vars(module)}


__all__ = ["QuantizedTensor", "reset_cast_buffers", "plain_kernels", "running_server", "training_mode"]
