"""A conditioning as the tensors of one cache file, and back.

The one rule: what comes back is what went in, but for the rounding of floating-point tensors. A tensor is
stored under its own name; everything else is in `LAYOUT`, JSON in which a nested tensor is its path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..model import Condition, Conditioning

LAYOUT = "layout"
_TENSOR, _MAPPING = "tensor", "mapping"


def pack(conditioning: Conditioning, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a conditioning, floating-point ones in `dtype`, and its layout as bytes."""
    tensors: dict[str, Tensor] = {}
    layout = {name: _take_apart(name, value, tensors) for name, value in conditioning.items()}
    layout = {name: part for name, part in layout.items() if part != {_TENSOR: name}}
    rounded = {
        name: (value.to(dtype) if value.is_floating_point() else value).clone()  # files share no memory
        for name, value in tensors.items()
    }
    if layout:
        rounded[LAYOUT] = torch.frombuffer(bytearray(json.dumps(layout).encode()), dtype=torch.uint8)
    return rounded


def unpack(tensors: Mapping[str, Tensor]) -> Conditioning:
    """Return the conditioning of which `pack` made these tensors, floating-point ones in float32."""
    values = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    text = values.pop(LAYOUT, None)
    layout: dict[str, Any] = json.loads(bytes(text.numpy())) if text is not None else {}
    nested = {name: _put_together(part, values) for name, part in layout.items()}
    # Earlier versions stored a number as a tensor without dimensions.
    plain = {name: value if value.ndim else value.item() for name, value in values.items()}
    return {**plain, **nested}


def _take_apart(path: str, value: Condition, tensors: dict[str, Tensor]) -> Any:
    """Return the JSON for a value, and add its tensors under their paths."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        return {_MAPPING: {key: _take_apart(f"{path}/{key}", part, tensors) for key, part in value.items()}}
    if isinstance(value, list | tuple):
        return [_take_apart(f"{path}/{index}", part, tensors) for index, part in enumerate(value)]
    return value


def _put_together(part: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value of such JSON, taking its tensors out of `tensors`."""
    if isinstance(part, list):
        return [_put_together(each, tensors) for each in part]
    if isinstance(part, dict) and _MAPPING in part:
        return {key: _put_together(each, tensors) for key, each in part[_MAPPING].items()}
    return tensors.pop(part[_TENSOR]) if isinstance(part, dict) else part
