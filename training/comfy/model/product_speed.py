"""What this device computes in a second, and whether it multiplies 8-bit weights faster as they are stored
than dequantized. Each is measured once and remembered in the cache folder, by device and version of PyTorch.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import comfy.model_management
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ...files.whole_file import whole_file
from ...log import log
from ...memory.device_memory import synchronize
from ...memory.eight_bit import FORMATS, refusal
from ...memory.quantize import quantize
from .. import paths
from ..inference_mode import leave_inference_mode
from ..versions import multiplies_fast
from .quantized import BLOCK_SCALED

ROWS, SIDE = 1024, 2048
"""Tokens and widths of the products that are measured: those of an image of 512 pixels."""
HEADS, MOST_ROWS, LONG_ENOUGH = 16, 16 * ROWS, 0.02
"""Of the block that is measured: its attention heads, its most tokens, and seconds that tell its speed."""
Measured = TypeVar("Measured", bool, float)


@functools.cache
def is_faster(format: str, device: torch.device) -> bool:
    """Return whether `device` multiplies weights of an 8-bit `format` faster as they are stored.

    Block-scaled formats are faster where comfy-kitchen says that the device has them.
    """
    if format not in FORMATS:
        layout = next(layout for layout, name in BLOCK_SCALED.items() if name == format)
        return multiplies_fast(layout)
    if refusal(format, device):
        return False
    return _remember(format, device, bool, lambda: _measure(format, device))


@functools.cache
def operations_a_second(dtype: torch.dtype, device: torch.device) -> float:
    """Return the floating-point operations a second that both passes of a transformer's block reach, with
    frozen weights; `StepEstimate.flops` counts the same ones.
    """
    return _remember(f"a block in {dtype}", device, float, lambda: _measure_block(dtype, device))


def _remember(
    what: str, device: torch.device, kind: type[Measured], measure: Callable[[], Measured]
) -> Measured:
    file = paths.cache_folder() / "products.json"
    name = comfy.model_management.get_torch_device_name(device)
    key = f"{what}, {name}, torch {torch.__version__}"
    known: dict[str, Measured] = {}
    with suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(file.read_text(encoding="utf-8")))
    if not isinstance(known.get(key), kind):
        known[key] = measure()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as temporary:
                temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be written (%s); the next start measures again.", file, error)
    return known[key]


def _measure(format: str, device: torch.device) -> bool:
    """Time both passes of one layer in both ways."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16
    weight = quantize(torch.randn(SIDE, SIDE, generator=generator).to(device), format, dtype)
    x = torch.randn(ROWS, SIDE, generator=generator).to(device, dtype)
    products = weight.multiplication
    assert products is not None

    def multiply_as_stored() -> None:
        products.forward(weight.parts, x, None)
        products.backward(weight.parts, x)

    def multiply_whole() -> None:
        x @ weight.dequantize(dtype).T
        x @ weight.dequantize(dtype)

    return _seconds(multiply_as_stored, device) < _seconds(multiply_whole, device)


def _measure_block(dtype: torch.dtype, device: torch.device) -> float:
    """Time a block on more and more tokens, until that takes long enough."""
    with leave_inference_mode(), torch.enable_grad():
        block = nn.TransformerEncoderLayer(
            SIDE // 2,
            HEADS,
            2 * SIDE,
            0.0,
            "gelu",
            batch_first=True,
            norm_first=True,
            device=device,
            dtype=dtype,
        ).requires_grad_(False)
        rows, seconds = ROWS // 16, 0.0
        while seconds < LONG_ENOUGH and rows < MOST_ROWS:
            rows *= 4
            x = torch.randn(1, rows, SIDE // 2, device=device, dtype=dtype, requires_grad=True)

            def compute(x: torch.Tensor = x) -> None:
                block(x).sum().backward()

            seconds = _seconds(compute, device)
        with FlopCounterMode(display=False) as counter:
            compute()
    return float(counter.get_total_flops() / seconds)


def _seconds(compute: Callable[[], None], device: torch.device) -> float:
    def once() -> float:
        began = time.perf_counter()
        compute()
        synchronize(device)
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(5))
