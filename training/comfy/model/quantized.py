"""Weights that ComfyUI has quantized: stored, dequantized and multiplied as they are in their file.

Formats are told by the class of ComfyUI's tensor (comfy-kitchen's layouts). Plain scaled fp8 and int8,
rotated or not, are multiplied by `eight_bit`; block-scaled ones (MXFP8, NVFP4) forward by the library's own
kernel and backward made whole, as their scales run along the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...memory.eight_bit import EightBit
from ...memory.quantize import Multiplication, Parts, StoredWeight
from ...user_error import UserError
from ..versions import QuantizedTensor, quantized_layout

BLOCK_SCALED = {"TensorCoreMXFP8Layout": "mxfp8", "TensorCoreNVFP4Layout": "nvfp4"}
"""Layouts of comfy-kitchen -> format."""


def stored_as_comfyui(tensor: Any, parts: Sequence[Tensor]) -> StoredWeight:
    """Return a quantized tensor with `parts`, which are its own as autograd can use them."""
    _, context = tensor.__tensor_flatten__()
    names = part_names(tensor)
    shape, stride, kind = tensor.shape, tensor.stride(), type(tensor)

    def restore(parts: Parts) -> Any:
        return kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, shape, stride)

    def dequantize(parts: Parts, dtype: torch.dtype) -> Tensor:
        return restore(parts).dequantize().to(dtype)  # type: ignore[no-any-return]

    return StoredWeight(tuple(parts), dequantize, multiplication=_multiplication(tensor, restore))


def part_names(tensor: Any) -> list[str]:
    """Return the names of the attributes that hold a quantized tensor's numbers and scales."""
    return list(tensor.__tensor_flatten__()[0])


def file_format(tensor: Any, where: str) -> str | None:
    """Return the format in which a quantized tensor can be multiplied, None if there is none.

    Raises UserError if its scales are missing; `where` is the layer's path.
    """
    if len(part_names(tensor)) < 2:
        raise UserError(
            f"{where}: the file has quantized this weight but lacks its scales (weight_scale); the weight "
            "cannot be read. Download the file again, or use one that is complete."
        )
    by = _multiplication(tensor, lambda parts: None)
    return by.format if by else None


def _multiplication(tensor: Any, restore: Any) -> Multiplication | None:
    layout, params = quantized_layout(tensor)
    if layout in BLOCK_SCALED:
        return BlockScaled(BLOCK_SCALED[layout], layout, restore)
    if layout.startswith("TensorCoreFP8"):
        return EightBit("fp8")
    if layout == "TensorWiseINT8Layout":
        return EightBit("int8", params["convrot_groupsize"] if params.get("convrot") else 0)
    return None


@dataclass(frozen=True)
class BlockScaled:
    """Products of weights with a scale for each block of inputs."""

    format: str
    layout: str
    restore: Any
    """restore(parts) -> ComfyUI's tensor."""

    def forward(self, parts: Parts, rows: Tensor, bias: Tensor | None) -> Tensor:
        small = QuantizedTensor.from_float(rows, self.layout)
        return F.linear(small, self.restore(parts), bias)

    def backward(self, parts: Parts, grads: Tensor) -> Tensor:
        weight: Tensor = self.restore(parts).dequantize()
        return grads @ weight.to(grads.dtype)
