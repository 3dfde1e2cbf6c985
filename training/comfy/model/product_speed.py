"""Whether this device multiplies 8-bit weights faster as they are stored than dequantized: measured once."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from contextlib import suppress

import comfy.model_management
import torch

from ...files.whole_file import whole_file
from ...log import log
from ...memory.device_memory import synchronize
from ...memory.eight_bit import FORMATS, refusal
from ...memory.quantize import quantize
from .. import paths
from ..versions import multiplies_fast
from .quantized import BLOCK_SCALED

ROWS, SIDE = 1024, 2048
"""Tokens and widths of the products that are measured: those of an image of 512 pixels."""


@functools.cache
def is_faster(format: str, device: torch.device) -> bool:
    """Return whether `device` multiplies weights of an 8-bit `format` faster as they are stored.

    The answer for a device and version of PyTorch stays in the cache folder. Block-scaled formats are faster
    where comfy-kitchen says that the device has them.
    """
    if format not in FORMATS:
        layout = next(layout for layout, name in BLOCK_SCALED.items() if name == format)
        return multiplies_fast(layout)
    if refusal(format, device):
        return False
    file = paths.cache_folder() / "products.json"
    name = comfy.model_management.get_torch_device_name(device)
    key = f"{format}, {name}, torch {torch.__version__}"
    known: dict[str, bool] = {}
    with suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(file.read_text(encoding="utf-8")))
    if not isinstance(known.get(key), bool):
        known[key] = _measure(format, device)
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


def _seconds(compute: Callable[[], None], device: torch.device) -> float:
    def once() -> float:
        began = time.perf_counter()
        compute()
        synchronize(device)
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(5))
