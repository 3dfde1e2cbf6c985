"""Frozen weights in storage: plain, or quantized to fewer bits and dequantized at each use.

A stored weight is tensors and a function of them; `weight_store.py` decides where they are. Quantizing only
serves the training run: the LoRA is for the original base.

| name | a number is stored as | bits | relative error for normal weights (Frobenius) |
|---|---|---|---|
| "fp8" | float8 e4m3 times a scale per row | 8 | 0.03 |
| "int8" | one of 255 steps up to its row's largest | 8 | 0.012 |
| "nf4" | a quantile of the normal distribution times the largest in its block of 64 | 4.1 | 0.10 |

nf4: Dettmers et al. 2023, arXiv:2305.14314, with doubly quantized scales, by bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..optional_packages import optional
from ..user_error import UserError
from .eight_bit import EightBit
from .eight_bit import Parts as Parts

SMALLEST = 4096
"""Elements; smaller weights are not quantized."""


class Multiplication(Protocol):
    """The products of a weight's parts, on their device: `EightBit`, or those of the library of a file's
    format.
    """

    @property
    def format(self) -> str: ...

    def forward(self, parts: Parts, rows: Tensor, bias: Tensor | None) -> Tensor: ...

    def backward(self, parts: Parts, grads: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class StoredWeight:
    """A weight as tensors (parts) and the function that makes the weight from them."""

    parts: Parts
    dequantize_parts: Callable[[Parts, torch.dtype], Tensor]
    """dequantize_parts(parts, dtype) -> the weight in its own shape, on the device of the parts."""
    is_plain: bool = False
    """Whether the one part is the weight itself."""
    multiplication: Multiplication | None = None
    """How its parts can be multiplied as they are."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.dequantize_parts(self.parts, dtype)


def plain(weight: Tensor) -> StoredWeight:
    """Return a weight stored as it is."""
    return StoredWeight((weight,), lambda parts, dtype: parts[0].to(dtype), is_plain=True)


def scaled(small: Tensor, scale: Tensor, format: str | None = None) -> StoredWeight:
    """Return a weight stored in a small format, with a scale that broadcasts over it.

    `format` is the row of `eight_bit.FORMATS` by which it can be multiplied, if any.
    """
    return StoredWeight(
        (small, scale),
        lambda parts, dtype: parts[0].to(dtype) * parts[1].to(dtype),
        multiplication=EightBit(format) if format else None,
    )


def quantize(weight: Tensor, name: str, dtype: torch.dtype) -> StoredWeight:
    """Quantize a weight (out, in) for use in `dtype`, on its own device.

    Raises UserError for an unknown name, and for nf4 without bitsandbytes.
    """
    if name not in FORMATS:
        raise UserError(f"base: {name!r} is not a quantization; choose one of {', '.join(FORMATS)}.")
    return FORMATS[name](weight, dtype)


def _fp8(weight: Tensor, dtype: torch.dtype) -> StoredWeight:
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = _row_scale(weight, limit, dtype)
    return scaled(
        (weight.float() / scale.float()).clamp_(-limit, limit).to(torch.float8_e4m3fn), scale, "fp8"
    )


def _int8(weight: Tensor, dtype: torch.dtype) -> StoredWeight:
    scale = _row_scale(weight, 127, dtype)
    return scaled((weight.float() / scale.float()).round_().clamp_(-127, 127).to(torch.int8), scale, "int8")


def _nf4(weight: Tensor, dtype: torch.dtype) -> StoredWeight:
    functional = optional("bitsandbytes.functional", "base 'nf4'", "choose 'int8'")
    quantized, state = functional.quantize_4bit(weight.to(dtype), quant_type="nf4", compress_statistics=True)

    def dequantize(parts: Parts, dtype: torch.dtype) -> Tensor:
        return functional.dequantize_4bit(parts[0], state).to(dtype)  # type: ignore[no-any-return]

    return StoredWeight((quantized,), dequantize)


def _row_scale(weight: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """Return (out, 1) scales in the dtype of use, so that both directions apply the same ones."""
    largest = weight.float().abs().amax(1, keepdim=True)
    return (largest / limit).clamp_min(torch.finfo(torch.float16).tiny).to(dtype)


FORMATS: Mapping[str, Callable[[Tensor, torch.dtype], StoredWeight]] = {
    "fp8": _fp8,
    "int8": _int8,
    "nf4": _nf4,
}
"""`MemoryConfig.base` -> function of (weight, dtype of use) that quantizes it."""
