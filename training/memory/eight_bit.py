"""Products of 8-bit weights: y = x W^T and grad_x = grad W, both operands in 8 bits.

The weight is 8-bit numbers times a scale per output, or one scale. Each row of x, or of grad, gets its own
scale when it is multiplied (per token, as LLM.int8, Dettmers et al. 2022, arXiv:2208.07339, without its
outliers). Scales of outputs are multiplied into grad before it is quantized, so one copy of W serves both
directions. Weights of rotated files (ConvRot: QuaRot's Hadamard rotation, Ashkboos et al. 2024,
arXiv:2404.00456, in groups) stay rotated: x is rotated before its product, grad_x after its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F

Parts = tuple[Tensor, ...]

MULTIPLE = 16
"""What both sides of a weight must be a multiple of: hardware multiplies 8-bit numbers in tiles."""

CHUNK = 1 << 18
"""Elements that are scaled at a time on the CPU, so that intermediate results stay in its cache."""

FEWEST_ROWS = 32
"""CUDA refuses int8 products of fewer than 17 rows; they are filled up to this many."""


@dataclass(frozen=True)
class Format:
    """An 8-bit number format and its products."""

    dtype: torch.dtype
    largest: float
    multiply: Callable[[Tensor, Tensor], Tensor]
    """multiply((rows, n), (n, columns)) -> the product of the numbers without scales, int32 or float32."""


def _multiply_int8(rows: Tensor, weight: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        return torch._int_mm(rows, weight)
    filled = F.pad(rows, (0, 0, 0, max(0, FEWEST_ROWS - len(rows))))
    return torch._int_mm(filled, _column_major(weight))[: len(rows)]


def _multiply_fp8(rows: Tensor, weight: Tensor) -> Tensor:
    one = torch.ones((), device=rows.device)
    return torch._scaled_mm(rows, _column_major(weight), one, one, out_dtype=torch.float32)


def _column_major(matrix: Tensor) -> Tensor:
    return matrix if matrix.T.is_contiguous() else matrix.T.contiguous().T


FORMATS: Mapping[str, Format] = {
    "int8": Format(torch.int8, 127, _multiply_int8),
    "fp8": Format(torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max, _multiply_fp8),
}
"""`MemoryConfig.compute` -> how it multiplies."""


@functools.cache
def refusal(format: str, device: torch.device) -> str:
    """Return why `device` cannot multiply in one of FORMATS in both directions; empty if it can."""
    row, side = FORMATS[format], 2 * MULTIPLE
    numbers = torch.arange(-7, 9, device=device).repeat(side * side // MULTIPLE).view(side, side)
    small = numbers.to(row.dtype)
    try:
        for weight in (small, small.T):
            found = row.multiply(small, weight).double().cpu()
            exact = numbers.double().cpu() @ (numbers if weight is small else numbers.T).double().cpu()
            if not torch.equal(found, exact):
                return "its products are wrong"
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return str(error).strip().partition("\n")[0]
    return ""


@dataclass(frozen=True)
class EightBit:
    """The products of a weight whose parts are 8-bit numbers (out, in) and their scales.

    The scales are (out, 1), a single one, or missing.
    """

    format: str
    """One of FORMATS."""
    rotation: int = 0
    """Inputs in a group of the Hadamard rotation that the weight had before it was quantized; 0 for none."""

    def forward(self, parts: Parts, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return rows (n, in) times W^T, plus the bias: (n, out) in the dtype of the rows."""
        weight, columns = parts[0], _columns(parts)
        in_one = _library_linear(self.format, rows)
        if in_one is not None and columns is not None:
            rotates = (True, self.rotation) if self.rotation else (False, 256)
            return in_one(rows, weight, columns.flatten(), bias, _CODES[rows.dtype], *rotates)
        rotated = rotate(rows, self.rotation) if self.rotation else rows
        return _product(FORMATS[self.format], rotated, None, weight.T, columns, bias)

    def backward(self, parts: Parts, grads: Tensor) -> Tensor:
        """Return grads (n, out) times W: (n, in) in the dtype of the gradients."""
        weight, columns = parts[0], _columns(parts)
        in_one = _library_linear(self.format, grads)
        if in_one is not None and columns is not None:
            scaled = grads * columns.to(grads.dtype)
            one = columns.new_ones(1)
            y = in_one(scaled, weight.T.contiguous(), one, None, _CODES[grads.dtype], False, 256)
        else:
            y = _product(FORMATS[self.format], grads, columns, weight, None, None)
        return rotate(y, self.rotation) if self.rotation else y


def _columns(parts: Parts) -> Tensor | None:
    """Return the scales of the outputs, (1, out) or (1, 1); None for numbers that have none."""
    return parts[1].float().reshape(1, -1) if len(parts) > 1 else None


def _product(
    format: Format,
    rows: Tensor,
    folded: Tensor | None,
    weight: Tensor,
    columns: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return (rows * folded) @ weight * columns + bias in the dtype of the rows."""
    small, scales = quantize_rows(rows, format, folded)
    return scale_product(format.multiply(small, weight), scales, columns, bias, rows.dtype)


def quantize_rows(rows: Tensor, format: Format, folded: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return rows (n, m) * folded (1, m) as 8-bit numbers and their scales (n, 1), float32.

    A row with NaN or Inf gets a scale that is none either, so its products are none: nothing is hidden.
    """
    small = torch.empty(rows.shape, dtype=format.dtype, device=rows.device)
    scales = torch.empty((len(rows), 1), device=rows.device)
    for part in _chunks(rows):
        # A copy, also of float32 rows: they are the caller's.
        numbers = rows[part].to(torch.float32, copy=True) if folded is None else rows[part] * folded
        scale = numbers.abs().amax(1, keepdim=True).div_(format.largest).clamp_min_(_SMALLEST_SCALE)
        numbers = numbers.mul_(scale.reciprocal())
        small[part] = numbers.round_() if format.dtype == torch.int8 else numbers
        scales[part] = scale
    return small, scales


_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def scale_product(
    y: Tensor, rows: Tensor, columns: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return y * rows * columns + bias in `dtype`, for scales (n, 1) and (1, m)."""
    scaled = torch.empty(y.shape, dtype=dtype, device=y.device)
    for part in _chunks(y):
        numbers = y[part] * rows[part]
        if columns is not None:
            numbers.mul_(columns)
        scaled[part] = numbers if bias is None else numbers.add_(bias)
    return scaled


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of the rows: all at once, or on the CPU as many as stay in its cache."""
    count = len(rows)
    is_whole = rows.device.type != "cpu" or torch.compiler.is_compiling()
    at_once = count if is_whole else max(1, CHUNK // rows.shape[1])
    # Fake numbers take the memory of a chunk, but no time for each.
    for start in range(0, min(count, at_once) if is_fake(rows) else count, at_once):
        yield slice(start, start + at_once)


def rotate(rows: Tensor, group: int) -> Tensor:
    """Multiply each `group` columns of the rows by a Hadamard matrix, which is its own inverse."""
    hadamard = _hadamard(group, rows.dtype, rows.device)
    return (rows.reshape(len(rows), -1, group) @ hadamard).view(rows.shape)


@functools.cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the regular, symmetric Hadamard matrix of a power of four, scaled to be orthogonal."""
    four = matrix = 0.5 - torch.eye(4).flip(1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    return matrix.to(device, dtype)


_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Dtypes as comfy-kitchen numbers them."""


def _library_linear(format: str, rows: Tensor) -> Callable[..., Tensor] | None:
    """Return comfy-kitchen's int8 product, which quantizes and scales in its own kernels on a GPU, if any.

    It takes (x, weight, scales, bias, dtype's code, whether to rotate, group).
    """
    if format != "int8" or rows.device.type != "cuda":
        return None
    operators: Any = torch.ops.comfy_kitchen
    return getattr(operators, "int8_linear", None)
