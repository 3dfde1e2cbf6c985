"""Which weights a model has: a digest that stays the same whatever ComfyUI does with the model meanwhile."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .at_rest import is_loaded, unload

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


def _tensors(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Find tensors in nested dicts, lists and objects (patches hold adapters that hold tuples of tensors)."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, torch.nn.Module):
        yield from _tensors(dict(part.state_dict()), f"{name}.{type(part).__name__}")
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
