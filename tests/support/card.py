"""A device that is no CPU, on a machine that has none: "card", whose memory is the host's.

Every operation on it is computed by the CPU's kernel, on the same bytes, so that results are those of the
CPU; but as on a graphics card, tensors of two devices do not go together, nothing is read without `.cpu()`,
and nobody but CUDA has what is in `torch.cuda`. What a graphics card does otherwise (streams, kernels of its
own, running out of memory) it does not show.

`install()` comes before `import comfy`, once a process; ComfyUI then takes it with `--directml`, its option
for a device that it knows nothing of.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "card"
DEVICE = os.environ.get("GRAFT_TEST_DEVICE", "cpu")
"""Where the tests run: "cpu", "cuda", the pretended "card"; "cuda-dynamic" and "dynamic" are these two under
dynamic VRAM."""
PRETENDED = DEVICE in ("card", "dynamic")
DYNAMIC = DEVICE in ("dynamic", "cuda-dynamic")

HOST, EXTENSION = 1, 12
"""Devices in a DLPack capsule (dlpack.h, DLDeviceType); torch takes the second for PrivateUse1."""

BOTH_DEVICES = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Operations whose indices may lie on the CPU on any device."""

crossed: list[str] = []
"""What has passed between the two devices, in order: "cpu -> card", "card -> cpu", or "number" for `.item()`.
On a graphics card, the program waits at each."""

_kernels: list[torch.library.Library] = []


def install() -> None:
    """Make the device known to torch, and to ComfyUI under the name of its option."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_compute, "PrivateUse1")
    aten.impl("_copy_from", _copy, "PrivateUse1")
    for operation in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
        aten.impl(operation, partial(_compute, operation), "PrivateUse1")  # modes do not reach the fallback
    aten.impl(
        "convolution_overrideable", partial(_compute, torch.ops.aten.convolution.default), "PrivateUse1"
    )
    aten.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    aten.impl("set_.source_Storage_storage_offset", _set_storage, "PrivateUse1")
    _kernels.extend((everything, aten))
    torch.version.cuda = None  # as in a torch for another kind of device: ComfyUI asks
    torch.Tensor.data = property(torch._C.TensorBase.data.__get__, _set_data)
    device = torch.device(NAME, 0)
    option = types.ModuleType("torch_directml")
    vars(option).update(device=lambda number=0: device, device_name=lambda number: NAME)
    sys.modules["torch_directml"] = option


class _Module(_DummyBackendModule):
    """What torch asks of `torch.card`."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """Set `tensor.data`, which torch lets move between the CPU and a graphics card, but not this one."""
    if tensor.device == data.device:
        torch._C.TensorBase.data.__set__(tensor, data)
    else:
        torch._C._swap_tensor_impl(tensor, data.detach().requires_grad_(tensor.requires_grad))


def _compute(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute on the CPU what torch has no other kernel for."""
    _assert_together(operation, (*args, *kwargs.values()))
    writes, makes, tensors, returned = _schema(operation)
    names = (argument.name for argument in operation._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs} if writes else {}
    by_name = {name: _mapped(_host, value) for name, value in kwargs.items()}
    made = [name for name in makes if given[name].numel() == 0]
    by_name |= {name: torch.empty_like(by_name[name]) for name in made}  # may grow, as a view may not
    on_host = [
        torch.tensor(value) if a.name in tensors and isinstance(value, int | float) else _mapped(_host, value)
        for a, value in zip(operation._schema.arguments, args, strict=False)
    ]
    if operation is torch.ops.aten._local_scalar_dense.default:
        crossed.append("number")
    results = operation(*on_host, **by_name)
    for name in made:
        given[name].data = on_card(by_name[name])
    several = results if len(returned) > 1 else (results,)
    values = [
        _mapped(on_card, value) if source is None else given[source]
        for source, value in zip(returned, several, strict=False)
    ]
    return tuple(values) if len(returned) > 1 else values[0] if returned else None


@cache
def _schema(operation: Any) -> tuple[dict[str, str], list[str], set[str], list[str | None]]:
    """Return which argument each alias that is written belongs to, which are outputs, which are tensors
    (torch gives plain numbers for some), and which argument each result is."""
    schema = operation._schema
    writes = {alias: a.name for a in schema.arguments if a.is_write for alias in a.alias_info.before_set}
    returned = [
        writes[next(iter(r.alias_info.before_set))] if r.alias_info and r.alias_info.is_write else None
        for r in schema.returns
    ]
    tensors = {a.name for a in schema.arguments if isinstance(a.type, torch.TensorType)}
    return writes, [a.name for a in schema.arguments if a.is_out], tensors, returned


def _mapped(convert: Callable[[Any], Any], value: Any) -> Any:
    return [convert(one) for one in value] if isinstance(value, list | tuple) else convert(value)


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if source.device != target.device:
        crossed.append(f"{source.device.type} -> {target.device.type}")
    _host(target).copy_(_host(source))
    return target


def _set_storage(tensor: Tensor, storage: Any, offset: int, size: Any, stride: Any = ()) -> Tensor:
    """Have a tensor of the card see a storage of the card, which the CPU's kernel would refuse."""
    room = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    room.owner = storage  # lives as long
    whole = torch.frombuffer(room, dtype=tensor.dtype)
    tensor.data = on_card(whole.as_strided(size, stride, offset))
    return tensor


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Any:
    bias_sizes = [weight.shape[0]]
    return _compute(torch.ops.aten.convolution_backward.default, grad, x, weight, bias_sizes, *options)


def _assert_together(operation: Any, arguments: tuple[Any, ...]) -> None:
    leaves = (one for value in arguments for one in (value if isinstance(value, list | tuple) else (value,)))
    strangers = [
        leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type != NAME and leaf.ndim > 0
    ]
    if strangers and operation.name().split(".")[0] not in BOTH_DEVICES:
        raise RuntimeError(
            f"{operation.name()}: a tensor of shape {tuple(strangers[0].shape)} is on "
            f"{strangers[0].device} and others on {NAME}."
        )


def _host(value: Any) -> Any:
    """Return the CPU's view of a tensor of the card, and the CPU for the card."""
    if isinstance(value, Tensor) and value.device.type == NAME:
        return _relabeled(value, HOST)
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def on_card(value: Any) -> Any:
    """Return the card's view of a tensor of the CPU."""
    return _relabeled(value, EXTENSION) if isinstance(value, Tensor) and value.device.type == "cpu" else value


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    """The beginning of dlpack.h's DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))


def _relabeled(tensor: Tensor, kind: int) -> Tensor:
    """Return a tensor over the same memory as one of another device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    device = _Tensor.from_address(_pointer(capsule, b"dltensor")).device
    device.kind, device.number = kind, 0
    return torch._C._from_dlpack(capsule)


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
