"""The base weights during a run: owned by the engine, and given back unchanged.

ComfyUI executes nodes in inference mode, and on NVIDIA newer versions cast weights into one buffer that the
next layer overwrites. Autograd can save neither. So inside `hold_weights` every frozen layer computes through
its `FrozenLayer`, and every other parameter is an ordinary tensor on the compute device. Every exit restores
everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import comfy.lora
import comfy.model_management
import comfy.utils
import torch
from torch import Tensor, nn

from ...frozen_base.frozen_layer import FrozenLayer, LayerSpec
from ...frozen_base.replace_forward import set_forward
from ...memory.eight_bit import EightBit
from ...memory.gguf import gguf_weight
from ...memory.quantize import Parts, StoredWeight, plain, scaled
from ...memory.weight_store import UNPLACED, Store
from ...model import HeldBase
from ..versions import QuantizedTensor
from .quantized import file_format, part_names, stored_as_comfyui

Patch = Callable[..., StoredWeight]
"""patch(name, weight, later=False) -> a module's weight with the MODEL's patches for it."""
FLOAT8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))


def layer_specs(network: nn.Module, patches: Container[str] = (), prefix: str = "") -> dict[str, LayerSpec]:
    """Return the layers that can be adapted, by module path.

    Layers are found by their attributes, as quantized linears are not `nn.Linear`. Weights with `patches`,
    whose keys begin with `prefix`, are plain in training even if their file has quantized them.
    """
    specs: dict[str, LayerSpec] = {}
    for path, module in network.named_modules():
        spec = _spec(module, path, is_patched=f"{prefix}.{path}.weight" in patches)
        if spec is not None:
            specs[path] = spec
    return specs


SCALES = ("scale_weight", "scale_input", "input_scale")
"""Parameters beside an fp8 weight: part of what `_stored` returns, or unused in training."""
UNUSED = ("norm_final.weight",)
"""Parameters that networks of older versions have and never use: Lumina 2's last norm."""


def named_numbers(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every parameter and persistent buffer, in the dtype that the model has.

    Quantized weights come as their parts. Names are sorted and the same in every version of ComfyUI (norms
    once called their weight "scale"), with or without dynamic VRAM.
    """
    for path, module in sorted(network.named_modules(), key=lambda item: item[0]):
        buffers = {n: t for n, t in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in sorted({**module._parameters, **buffers}.items()):
            where = f"{path}.{'weight' if name == 'scale' else name}"
            if tensor is None or name in SCALES or where in UNUSED:
                continue
            whole = _as_in_model(to_ordinary(tensor), module, name)
            stored = _stored(whole, tensor, module if name == "weight" else None)
            for index, part in enumerate(stored.parts):
                yield (f"{where}.{index}" if index else where), part


@contextmanager
def hold_weights(patcher: Any, network: nn.Module, prefix: str, store: Store) -> Iterator[HeldBase]:
    """Own the weights of `network`, which is `patcher.model.<prefix>`, and keep them as `store` says.

    Patches on the patcher (LoRAs loaded before) apply. Enter it outside inference mode, with every ComfyUI
    model unloaded, so that the modules hold the plain host weights.
    """
    assert not torch.is_inference_mode_enabled()
    specs = layer_specs(network, patcher.patches, prefix)
    layers: dict[str, FrozenLayer] = {}
    with ExitStack() as undo:
        for path, module in network.named_modules():
            patch = partial(_apply_patches, patcher.patches, f"{prefix}.{path}")
            if path in specs:
                layers[path] = _hold_layer(path, specs[path], module, patch, store, undo)
            else:
                _hold_loose(module, patch, store, undo)
        yield HeldBase(network, layers)


def _hold_layer(
    path: str, spec: LayerSpec, module: nn.Module, patch: Patch, store: Store, undo: ExitStack
) -> FrozenLayer:
    """Let a layer that can be adapted compute with the weight and bias that `store` keeps for it."""
    loaded, tensors = _tensors(module)
    # What the file quantized stays quantized; patches make it plain, unless they are applied at each use.
    stored = {n: _stored(t, loaded[n], module if n == "weight" else None) for n, t in tensors.items()}
    stored = {n: patch(n, weight, later=store.name in (UNPLACED, "stream")) for n, weight in stored.items()}
    layer = FrozenLayer(path, spec, module, store.make_fetch(path, spec, stored["weight"]))
    layer.products = store.products.get(path)
    if "bias" in stored:
        # A bias is small: always on the device.
        bias = stored["bias"].dequantize(store.dtype).to(store.device)
        layer.bias = lambda dtype, device: bias.to(device, dtype)
    undo.callback(set_forward(module, layer.forward))
    # The module's own tensors compute nothing now, but networks ask them for dtype and device. A GGUF
    # loader's stay: only they know the shape of what their bytes stand for.
    for name, tensor in tensors.items():
        if not is_gguf(loaded[name]):
            undo.callback(replace(module, name, tensor))
    return layer


def _hold_loose(module: nn.Module, patch: Patch, store: Store, undo: ExitStack) -> None:
    """Replace the tensors of a norm, or whatever else is no layer, by plain ones on the compute device."""
    loaded, tensors = _tensors(module)
    for name, tensor in tensors.items():
        # The module's own code computes with it, so nothing may stay quantized.
        weight = patch(name, _gguf(tensor, loaded[name]) or plain(tensor))
        whole = weight.parts[0] if weight.is_plain else weight.dequantize(store.dtype)
        undo.callback(replace(module, name, _resident(whole, name in module._buffers, store)))


def _tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a module's own parameters and buffers as the loader left them, and as autograd can use them."""
    slots = {**module._parameters, **module._buffers}
    loaded = {name: tensor for name, tensor in slots.items() if tensor is not None}
    return loaded, {name: _as_in_model(to_ordinary(t), module, name) for name, t in loaded.items()}


def to_ordinary(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that autograd can save: it refuses inference tensors."""
    if is_gguf(tensor):
        tensor = tensor.as_subclass(Tensor)
    if not tensor.is_inference() or isinstance(tensor, QuantizedTensor):
        return tensor.detach()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _as_in_model(tensor: Tensor, module: nn.Module, name: str) -> Tensor:
    """Return a weight in the model's dtype; under dynamic VRAM it has the file's until it is moved."""
    dtype = getattr(module, f"{name}_comfy_model_dtype", None)
    if dtype is None or isinstance(tensor, QuantizedTensor) or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype) if dtype.itemsize <= tensor.dtype.itemsize else tensor


def _spec(module: nn.Module, path: str, is_patched: bool) -> LayerSpec | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    shape = tuple(weight.shape)
    quantized = None if is_patched else _quantized_bytes(weight)
    has_bias = getattr(module, "bias", None) is not None
    format = None if is_patched or quantized is None else _format(weight, path)
    if hasattr(module, "in_features") and hasattr(module, "out_features") and len(shape) == 2:
        sides: Any = module  # quantized weights may have another shape
        sizes = int(sides.out_features), int(sides.in_features)
        return LayerSpec("linear", sizes, {}, quantized, has_bias, format)
    if hasattr(module, "kernel_size") and not getattr(module, "transposed", False) and len(shape) in (3, 4):
        if getattr(module, "padding_mode", "zeros") != "zeros":
            return None
        options = {key: getattr(module, key) for key in ("stride", "padding", "dilation", "groups")}
        return LayerSpec(f"conv{len(shape) - 2}d", shape, options, quantized, has_bias, format)
    if hasattr(module, "num_embeddings") and len(shape) == 2:
        return LayerSpec("embedding", shape, {"padding_idx": module.padding_idx}, quantized)
    return None


def _stored(tensor: Tensor, loaded: Any, module: nn.Module | None) -> StoredWeight:
    """Return a host weight for the store; a quantized one stays quantized.

    `loaded` is the loader's own tensor, `tensor` an ordinary one over the same memory.
    """
    from_gguf = _gguf(tensor, loaded)
    if from_gguf is not None:
        return from_gguf
    if isinstance(tensor, QuantizedTensor):
        return _as_comfyui(tensor)
    scale = getattr(module, "scale_weight", None)
    if tensor.dtype in FLOAT8 and scale is not None:
        return scaled(tensor, to_ordinary(scale), "fp8")
    stored = plain(tensor)
    # Numbers that were cast to fp8 have no scale.
    is_cast = tensor.dtype in FLOAT8 and module is not None
    return dataclasses.replace(stored, multiplication=EightBit("fp8")) if is_cast else stored


def _as_comfyui(tensor: Any) -> StoredWeight:
    return stored_as_comfyui(tensor, [to_ordinary(getattr(tensor, name)) for name in part_names(tensor)])


def _quantized_bytes(weight: Tensor) -> int | None:
    """Return the bytes of a quantized weight, None for a plain one."""
    if isinstance(weight, QuantizedTensor):
        return _as_comfyui(weight).nbytes
    if _gguf_type(weight):
        return weight.as_subclass(Tensor).nbytes
    return weight.nbytes if weight.dtype in FLOAT8 else None


def _format(weight: Tensor, where: str) -> str | None:
    """Return the format in which a quantized weight can be multiplied as it is, None if there is none."""
    if isinstance(weight, QuantizedTensor):
        return file_format(weight, where)
    return "fp8" if weight.dtype in FLOAT8 else None


def _gguf(tensor: Tensor, loaded: Any) -> StoredWeight | None:
    """Return a quantized weight of a GGUF file; None for plain weights and other files."""
    kind = _gguf_type(loaded)
    return gguf_weight(tensor, kind, tuple(loaded.shape)) if kind else None


def is_gguf(tensor: Any) -> bool:
    """Return whether a tensor is of ComfyUI-GGUF's class, whose shape is that of the dequantized weight."""
    return hasattr(tensor, "tensor_type")


def _gguf_type(loaded: Any) -> str | None:
    """Return the type of a quantized GGUF weight, such as "Q4_K"; None for plain numbers."""
    kind = getattr(getattr(loaded, "tensor_type", None), "name", None)
    return None if kind in ("F32", "F16") else kind


def _apply_patches(
    patches: Mapping[str, Any], owner: str, name: str, weight: StoredWeight, *, later: bool = False
) -> StoredWeight:
    """Return a module's host weight with the incoming MODEL's patches for it, computed now or at each use."""
    key = f"{owner}.{name}"
    if key not in patches:
        return weight

    def dequantize(parts: Parts, dtype: torch.dtype) -> Tensor:
        whole = weight.dequantize_parts(parts, torch.float32)
        # ComfyUI adds patches in place: not to the base itself.
        changed = whole.clone() if any(whole is part for part in parts) else whole
        return comfy.lora.calculate_weight(patches[key], changed, key).to(dtype)  # type: ignore[no-any-return]

    return StoredWeight(weight.parts, dequantize) if later else plain(dequantize(weight.parts, torch.float32))


def _dequantized(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def _resident(tensor: Tensor, is_buffer: bool, store: Store) -> Tensor:
    """Place a norm's weight or another loose parameter; they are small, so always on the compute device.

    Buffers keep their own dtype.
    """
    tensor = _dequantized(tensor)
    keeps_dtype = is_buffer or not tensor.is_floating_point()
    return tensor.to(store.device) if keeps_dtype else tensor.to(store.device, store.dtype)


def replace(module: nn.Module, name: str, tensor: Tensor) -> Callable[[], None]:
    """Put a tensor in a parameter's or buffer's place; return the function that restores the old one."""
    slot: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    before = slot[name]
    slot[name] = nn.Parameter(tensor, requires_grad=False) if slot is module._parameters else tensor

    def restore() -> None:
        slot[name] = before

    return restore
