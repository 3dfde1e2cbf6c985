"""A plain LoRA in PEFT's form: `lora_A` and `lora_B` with alpha in them, one for each part of a fused layer.

Parts of a layer share `lora_A` and have their rows of `lora_B`; where a program keeps scale before shift, the
halves are swapped. ai-toolkit, diffusers and ComfyUI read this form, under the names that they know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .names import Part, spell

DOWN, UP, ALPHA = "lora_down.weight", "lora_up.weight", "alpha"


def is_plain(values: Mapping[str, Tensor]) -> bool:
    """Return whether a layer's tensors, by suffix, are a LoRA of two factors and nothing else."""
    return set(values) - {ALPHA} == {DOWN, UP}


def shape_of(values: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the shape of the weight that a plain LoRA layer changes."""
    return (len(values[UP]), *values[DOWN].shape[1:])


def peft_tensors(values: Mapping[str, Tensor], parts: Iterable[Part], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a plain LoRA layer under the names of its parts, in its dtype."""
    down, up = values[DOWN], values[UP].flatten(1).float()
    up = up * (float(values[ALPHA]) / len(down) if ALPHA in values else 1.0)
    tensors: dict[str, Tensor] = {}
    for part in parts:
        rows = up[part.first : part.stop]
        name = spell(prefix, part.name)
        tensors[f"{name}.lora_A.weight"] = down.clone()
        tensors[f"{name}.lora_B.weight"] = _as_kernel(swap_halves(rows) if part.swapped else rows, down)
    return tensors


def swap_halves(rows: Tensor) -> Tensor:
    """Return rows with their second half first."""
    first, second = rows.chunk(2)
    return torch.cat((second, first))


def _as_kernel(up: Tensor, down: Tensor) -> Tensor:
    return up.reshape(*up.shape[:2], *(1,) * (down.ndim - 2)).to(down.dtype).contiguous().clone()
