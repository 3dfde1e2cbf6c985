"""The engine owns the base weights during a run.

ComfyUI executes nodes in inference mode, and on NVIDIA its newer versions cast weights into one buffer that
the next
layer overwrites: autograd may keep neither. So for the duration of `held` every frozen layer computes
through its own
accessor (`training.layer.FrozenLayer`), every other parameter is an ordinary tensor on the compute device,
attention is
PyTorch's, and ComfyUI's cast buffers are not on the path. On every exit all is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import comfy.lora
import comfy.model_management
import comfy.utils
import torch
from torch import Tensor, nn

from ..layer import FrozenLayer, LayerSpec
from ..model import HeldBase
from .versions import QuantizedTensor

FLOAT8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))


def layer_specs(network: nn.Module) -> dict[str, LayerSpec]:
    """Return what an adapter could sit on, by module path, found by role: quantised linears are no
    `nn.Linear`.
    """
    found = ((path, _spec(module)) for path, module in network.named_modules())
    return {path: spec for path, spec in found if spec is not None}


@contextmanager
def held(
    patcher: Any, network: nn.Module, prefix: str, dtype: torch.dtype, device: torch.device
) -> Iterator[HeldBase]:
    """Own the weights of `network`, which is `patcher.model.<prefix>`, computing in `dtype` on `device`.

    Patches on the patcher (LoRAs loaded before) apply. Must be entered outside inference mode, with every
    ComfyUI model
    unloaded, so that the modules hold the plain host weights.
    """
    assert not torch.is_inference_mode_enabled()
    specs = layer_specs(network)
    layers: dict[str, FrozenLayer] = {}
    with ExitStack() as undo:
        for path, module in network.named_modules():
            own = {**dict(module._parameters), **dict(module._buffers)}
            weights = {
                n: _patched(patcher, f"{prefix}.{path}.{n}", t) for n, t in own.items() if t is not None
            }
            if path in specs:
                fetch = {
                    n: _accessor(t, module, dtype, device)
                    for n, t in weights.items()
                    if n in ("weight", "bias")
                }
                layer = FrozenLayer(path, specs[path], module, fetch["weight"], fetch.get("bias"))
                layers[path] = layer
                undo.callback(set_forward(module, layer.forward))
            for name, tensor in weights.items():
                resident = (
                    tensor if path in specs else _resident(tensor, name in module._buffers, dtype, device)
                )
                undo.callback(_replace(module, name, resident))
        yield HeldBase(network, layers)


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace a module's forward; return the function that puts back what was there."""
    before = module.__dict__.get("forward")
    module.forward = forward

    def restore() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = before

    return restore


def ordinary(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that autograd may use; inference tensors may not be saved for
    backward.
    """
    if not tensor.is_inference() or isinstance(tensor, QuantizedTensor):
        return tensor.detach()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(  # type: ignore[no-any-return, call-overload]
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _spec(module: nn.Module) -> LayerSpec | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    shape = tuple(weight.shape)
    if hasattr(module, "in_features") and hasattr(module, "out_features") and len(shape) == 2:
        return LayerSpec("linear", (int(module.out_features), int(module.in_features)))
    if hasattr(module, "kernel_size") and not getattr(module, "transposed", False) and len(shape) in (3, 4):
        if getattr(module, "padding_mode", "zeros") != "zeros":
            return None
        options = {key: getattr(module, key) for key in ("stride", "padding", "dilation", "groups")}
        return LayerSpec(f"conv{len(shape) - 2}d", shape, options)
    if hasattr(module, "num_embeddings") and len(shape) == 2:
        return LayerSpec("embedding", shape, {"padding_idx": module.padding_idx})
    return None


def _patched(patcher: Any, key: str, tensor: Tensor) -> Tensor:
    """Return the host weight with the patches that the incoming MODEL carries for it."""
    if key not in patcher.patches:
        return ordinary(tensor)
    weight = _dequantised(ordinary(tensor)).to(torch.float32, copy=True)
    return comfy.lora.calculate_weight(patcher.patches[key], weight, key)  # type: ignore[no-any-return]


def _accessor(
    tensor: Tensor, module: nn.Module, dtype: torch.dtype, device: torch.device
) -> Callable[[torch.dtype, torch.device], Tensor]:
    """Return fetch(dtype, device) for a host weight: plain ones are placed once, quantised ones stay as they
    are.
    """
    if isinstance(tensor, QuantizedTensor):
        packed = tensor.to(device)
        return lambda dtype, device: _dequantised(packed).to(device, dtype)
    if tensor.dtype in FLOAT8:
        small, scale = tensor.to(device), getattr(module, "scale_weight", None)
        if scale is None:
            return lambda dtype, device: small.to(device, dtype)
        factor = ordinary(scale).to(device)
        return lambda dtype, device: small.to(device, dtype) * factor.to(dtype)
    placed = tensor.to(device, dtype)
    return lambda dtype, device: placed.to(device, dtype)


def _dequantised(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def _resident(tensor: Tensor, is_buffer: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Place a norm's weight or a loose parameter: small, so always on the compute device, buffers in their
    own dtype.
    """
    tensor = _dequantised(tensor)
    return tensor.to(device) if is_buffer or not tensor.is_floating_point() else tensor.to(device, dtype)


def _replace(module: nn.Module, name: str, tensor: Tensor) -> Callable[[], None]:
    slot = module._parameters if name in module._parameters else module._buffers
    before = slot[name]
    slot[name] = nn.Parameter(tensor, requires_grad=False) if slot is module._parameters else tensor

    def restore() -> None:
        slot[name] = before

    return restore
