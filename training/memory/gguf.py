"""Weights of GGUF files: the quantized bytes that a loader hands on, and PyTorch code that dequantizes them.

Layouts: ggml's ggml-common.h and ggml-quants.c. A block of bytes stands for 32 numbers (256 for the K types);
factors are float16. Weights stay quantized during training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..user_error import UserError
from .quantize import StoredWeight

AT_ONCE = 1 << 22
"""Numbers dequantized at once; intermediate results take up to 12 bytes each."""


@dataclass(frozen=True)
class Layout:
    """One GGUF type."""

    size: int
    """Bytes of a block."""
    dequantize: Callable[[Tensor], Tensor]
    """(blocks, size) uint8 -> (blocks, numbers) float32"""


def gguf_weight(raw: Tensor, kind: str, shape: tuple[int, ...]) -> StoredWeight:
    """Return the weight of `shape` with the bytes `raw` of GGUF type `kind`, such as "Q4_K".

    Raises UserError for types missing from LAYOUTS.
    """
    if kind not in LAYOUTS:
        raise UserError(
            f"GGUF type {kind} cannot be trained on; use a file of type {', '.join(LAYOUTS)} or the original."
        )
    layout = LAYOUTS[kind]

    def dequantize(parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        blocks = parts[0].view(-1, layout.size)
        whole = torch.empty(shape, dtype=dtype, device=blocks.device)
        numbers = whole.view(len(blocks), -1)
        at_once = max(1, AT_ONCE // numbers.shape[1])
        for start in range(0, len(blocks), at_once):
            numbers[start : start + at_once] = layout.dequantize(blocks[start : start + at_once])
        return whole

    return StoredWeight((raw.reshape(-1).view(torch.uint8),), dequantize)


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Read float16 numbers of every block as (blocks, count) float32."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Return the low halves of the bytes (..., n), then the high ones: (..., 2 n)."""
    return torch.cat([data & 15, data >> 4], -1)


def _bits(data: Tensor, count: int) -> Tensor:
    """Return bits 0 to `count` - 1 of the bytes (blocks, n) as (blocks, count, n)."""
    shifts = torch.arange(count, dtype=torch.uint8, device=data.device)
    return (data[:, None, :] >> shifts[:, None]) & 1


def _q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _halves(blocks, 2)


def _q5(blocks: Tensor, start: int) -> Tensor:
    high = _bits(blocks[:, start : start + 4].reshape(-1, 1), 8).reshape(len(blocks), 32)
    return (_nibbles(blocks[:, start + 4 :]) | (high << 4)).float()


def _q5_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_q5(blocks, 2) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _q5(blocks, 4) + _halves(blocks, 2)


def _pairs(data: Tensor) -> Tensor:
    """Return the bits of bytes (blocks, n * 32) two by two, as the K types have them: (blocks, n * 4, 32)."""
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=data.device)
    return ((data.reshape(len(data), -1, 1, 32) >> shifts[:, None]) & 3).flatten(1, 2)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, numbers = blocks[:, :16], _pairs(blocks[:, 16:80]).view(-1, 16, 16).float()
    factor, minimum = _halves(blocks, 80) * (scales & 15), _halves(blocks, 82) * (scales >> 4)
    return (factor[..., None] * numbers - minimum[..., None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    numbers = (_pairs(blocks[:, 32:96]) | (_bits(blocks[:, :32], 8) << 2)).view(-1, 16, 16).float() - 4
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, None, 104:108] >> shifts[:, None]) & 3).flatten(1)
    scales = (_nibbles(blocks[:, 96:104]) | (high << 4)).float() - 32
    return ((_halves(blocks, 108) * scales)[..., None] * numbers).flatten(1)


def _k_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight 6-bit scales and minima (blocks, 8) that 12 bytes (blocks, 12) hold."""
    low, middle, high = scales.view(-1, 3, 4).unbind(1)
    scale = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], 1)
    least = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], 1)
    return scale.float(), least.float()


def _k(blocks: Tensor, numbers: Tensor) -> Tensor:
    """Apply the factors of Q4_K and Q5_K to numbers (blocks, 8, 32)."""
    scale, least = _k_scales(blocks[:, 4:16].contiguous())
    factor, minimum = _halves(blocks, 0) * scale, _halves(blocks, 2) * least
    return (factor[..., None] * numbers.float() - minimum[..., None]).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    return _k(blocks, low | (_bits(blocks[:, 16:48], 8) << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 8, 32)
    numbers = (low | (_pairs(blocks[:, 128:192]) << 4)).view(-1, 16, 16).float() - 32
    factor = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (factor[..., None] * numbers).flatten(1)


def _looked_up(nibbles: Tensor) -> Tensor:
    """Return the values that the four bits of the IQ4 types stand for."""
    return _iq4_values(nibbles.device)[nibbles.int()]


@cache
def _iq4_values(device: torch.device) -> Tensor:
    """Return the sixteen values, denser around 0; cached, as copying them makes the device wait."""
    values = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return torch.tensor(values, dtype=torch.float32, device=device)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _looked_up(_nibbles(blocks[:, 2:]))


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], -1).flatten(1)
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, 2:4, None] >> shifts) & 3).flatten(1)
    factor = _halves(blocks, 0) * ((low | (high << 4)).float() - 32)
    return (factor[..., None] * _looked_up(_nibbles(blocks[:, 8:].view(-1, 8, 16)))).flatten(1)


LAYOUTS: Mapping[str, Layout] = {
    "BF16": Layout(2, lambda blocks: blocks.view(torch.bfloat16).float()),
    "Q8_0": Layout(34, _q8_0),
    "Q4_0": Layout(18, _q4_0),
    "Q4_1": Layout(20, _q4_1),
    "Q5_0": Layout(22, _q5_0),
    "Q5_1": Layout(24, _q5_1),
    "Q2_K": Layout(84, _q2_k),
    "Q3_K": Layout(110, _q3_k),
    "Q4_K": Layout(144, _q4_k),
    "Q5_K": Layout(176, _q5_k),
    "Q6_K": Layout(210, _q6_k),
    "IQ4_NL": Layout(18, _iq4_nl),
    "IQ4_XS": Layout(136, _iq4_xs),
}
"""GGUF's name of a type -> its layout."""
