"""Which weights a model has: a digest that stays the same whatever ComfyUI does with the model meanwhile."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from .at_rest import is_loaded, unload
from .weights import is_gguf, ordinary

SAMPLED = 16
"""At least so many tensors of each part have their numbers looked at; a file of 24 GB is not read whole."""


def fingerprint(*parts: Any, patchers: tuple[Any, ...] = ()) -> str:
    """Digest modules, patches and numbers: names and shapes of all their tensors, every single number, and
    the first 4 KB of `SAMPLED` weights of each part.

    `patchers` hold the modules' weights, and are brought to rest first. Loose parameters, which ComfyUI may
    leave cast afterwards, count by name and shape only.
    """
    if any(map(is_loaded, patchers)):
        unload(*patchers)
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(b"part;")
        tensors = dict(_tensors(part, ""))
        looked_at = {name for name, tensor in tensors.items() if tensor.ndim == 0} | set(_sample(tensors))
        for name, tensor in tensors.items():
            digest.update(f"{name}:{tuple(tensor.shape)};".encode())
            if name in looked_at:
                with torch.no_grad():
                    start = tensor.detach().flatten()[:1024].to("cpu", torch.float32)
                digest.update(start.numpy().tobytes())
    return digest.hexdigest()


def _sample(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return evenly spaced names: of the layers' weights, or of everything where there are none."""
    weights = [name for name, tensor in tensors.items() if tensor.ndim > 1 and name.endswith(".weight")]
    names = weights or list(tensors)
    return names[:: max(1, len(names) // SAMPLED)]


def settings(part: Any, name: str = "", seen: frozenset[int] = frozenset()) -> Iterator[str]:
    """Find numbers and words in nested options, and in what their functions were made with.

    Objects are left out: they may change while pictures are drawn, and a model would not be known again.
    """
    inside: list[tuple[Any, Any]] = []
    if isinstance(part, Mapping):
        inside = sorted(part.items(), key=lambda item: str(item[0]))
    elif isinstance(part, list | tuple):
        inside = list(enumerate(part))
    elif isinstance(part, int | float | str):
        yield f"{name}={part!r}"
    elif isinstance(part, partial):
        inside = [("function", part.func), ("args", part.args), ("keywords", part.keywords)]
    elif isinstance(part, FunctionType):
        yield f"{name}={part.__qualname__}"
        cells = [cell for cell in part.__closure__ or () if cell != CellType()]
        inside = [(index, cell.cell_contents) for index, cell in enumerate(cells)]
    for key, value in inside:
        if id(value) not in seen:
            yield from settings(value, f"{name}.{key}", seen | {id(part)})


def _weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return a module's weights and buffers; ComfyUI-GGUF's give stand-ins for what they have."""
    packed = {name: ordinary(weight) for name, weight in module.named_parameters() if is_gguf(weight)}
    found = module.state_dict()
    return {**{name: t for name, t in found.items() if not (packed and t.is_meta)}, **packed}


def _tensors(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Find tensors in nested dicts, lists and objects (patches hold adapters that hold tuples of tensors)."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, torch.nn.Module):
        yield from _tensors(_weights(part), f"{name}.{type(part).__name__}")
    elif isinstance(part, Mapping):
        for key in sorted(part, key=str):
            yield from _tensors(part[key], f"{name}.{key}")
    elif isinstance(part, list | tuple):
        for index, item in enumerate(part):
            yield from _tensors(item, f"{name}.{index}")
    elif isinstance(part, int | float):
        yield name, torch.tensor(float(part))
    elif hasattr(part, "weights"):  # a comfy.weight_adapter
        yield from _tensors(part.weights, f"{name}.{type(part).__name__}")
