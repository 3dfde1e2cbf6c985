"""What a step spends its time on, and what an 8-bit step would take if nothing but its parts counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from ...training.frozen_base.replace_forward import replaced
from ...training.memory import eight_bit

GROUPS: Mapping[str, tuple[str, ...]] = {
    "int8 products": ("aten::_int_mm",),
    "products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"),
    "convolutions": ("aten::mkldnn_convolution", "aten::convolution_backward", "aten::slow_conv"),
    "attention": ("aten::_scaled_dot_product", "aten::_flash_attention"),
}
"""Part of a step -> the beginnings of its operations' names; the rest is "other"."""
QUANTIZING, SCALING = "quantizing", "scaling"

Product = tuple[int, int, int]
"""(rows, inner, columns)"""


def profile_step(steps: Callable[[int], object]) -> tuple[dict[str, float], Counter[Product]]:
    """Return the shares of a step's time by part, and how often it has a product of each shape.

    `steps(count)` takes count steps after one to warm up; what a run does besides its steps is subtracted.
    """
    (seconds, products), (before, beside) = _record(lambda: steps(2)), _record(lambda: steps(0))
    each = {name: max(0.0, value - before[name]) for name, value in seconds.most_common()}
    whole = sum(each.values())
    shapes = Counter({shape: (count - beside[shape]) // 2 for shape, count in products.items()})
    return {name: round(value / whole, 4) for name, value in each.items() if value}, +shapes


def _record(compute: Callable[[], object]) -> tuple[Counter[str], Counter[Product]]:
    activities = [ProfilerActivity.CPU]
    with _named_parts(), profile(activities=activities, record_shapes=True) as recorded:
        compute()
    seconds: Counter[str] = Counter()
    products: Counter[Product] = Counter()
    for event in recorded.events() or ():
        seconds[_part(event)] += event.self_cpu_time_total
        if event.name in GROUPS["products"] and (shape := _shape(event.input_shapes)):
            products[shape] += 1
    return seconds, products


def int8_share(products: Counter[Product], clock: Callable[[], float]) -> float:
    """Return the time of the int8 products of these shapes as a share of that of the bf16 ones.

    Products of fewer than 64 columns or inner elements are a LoRA's own or attention's: left out.
    """
    totals = [0.0, 0.0]
    for (rows, inner, columns), count in products.items():
        if min(inner, columns) < 64:
            continue
        large = torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16()
        small = torch.ones(rows, inner, dtype=torch.int8), torch.ones(columns, inner, dtype=torch.int8)
        totals[0] += count * _fastest(torch.mm, large, clock)
        totals[1] += count * _fastest(torch._int_mm, small, clock)
    return totals[1] / totals[0] if totals[0] else 1.0


def _fastest(
    multiply: Callable[[Tensor, Tensor], Tensor],
    factors: tuple[Tensor, Tensor],
    clock: Callable[[], float],
) -> float:
    def once() -> float:
        began = clock()
        multiply(factors[0], factors[1].T)
        return clock() - began

    return min(once() for _ in range(5))


@contextmanager
def _named_parts() -> Iterator[None]:
    """Give quantizing and scaling names that the profiler sees."""

    def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any) -> Any:
            with record_function(name):
                return function(*args)

        return compute

    with (
        replaced(eight_bit, "quantize_rows", named(QUANTIZING, eight_bit.quantize_rows)),
        replaced(eight_bit, "scale_product", named(SCALING, eight_bit.scale_product)),
    ):
        yield


def _part(event: Any) -> str:
    above = event
    while above is not None:
        if above.name in (QUANTIZING, SCALING):
            return str(above.name)
        for part, names in GROUPS.items():
            if above.name.startswith(names) and (part != "products" or above.name in names):
                return part
        above = above.cpu_parent
    return "other"


def _shape(shapes: Any) -> Product | None:
    """Return the shape of a product of two matrices, given those of its operands, the last two."""
    matrices = [tuple(shape) for shape in shapes if len(shape) == 2][-2:]
    if len(matrices) < 2 or matrices[0][1] != matrices[1][0]:
        return None
    return matrices[0][0], matrices[0][1], matrices[1][1]
