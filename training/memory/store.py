"""Where a frozen layer's weight is kept, and how it comes to the device: one function a layer.

Weights of the repeated blocks are what there is to save on: only they are quantised or kept in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..layer import Fetch, LayerSpec
from .checkpointing import block_of
from .offload import Ring, StreamCopier, has_streams, pinned
from .quantize import FORMATS, SMALLEST, Packed, pack, plain

STORES = ("resident", "fp8", "int8", "nf4", "offload")
"""On the device in the compute dtype; there in fewer bits; in host memory."""

UNPLACED = "unplaced"
"""Left where the file's loader put them, for a forecast, which computes nothing."""


@dataclass
class Store:
    """The weights of one network, for the time that they are held."""

    name: str
    """One of STORES."""
    blocks: tuple[str, ...]
    """Globs of the repeated blocks' paths."""
    dtype: torch.dtype
    device: torch.device
    ring: Ring | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    """Block -> bytes of its weights in host memory."""

    def __post_init__(self) -> None:
        if self.name not in (*STORES, UNPLACED):
            raise ValueError(f"base: {self.name!r} is unknown; choose one of {', '.join(STORES)}.")
        if self.name == "offload" and has_streams(self.device):
            self.ring = Ring(StreamCopier(self.device), 0)

    def fetch_of(self, path: str, spec: LayerSpec, weight: Packed) -> Fetch:
        """Take a layer's host weight and return the function that brings it in."""
        if self.name == UNPLACED:
            return _fetch(weight)
        block = block_of(path, self.blocks)
        if block is not None and self._quantises(spec, weight):
            whole = moved(weight, self.device).weight(torch.float32)
            return _fetch(pack(whole, self.name, self.dtype))
        if self.name == "offload" and block is not None:
            return self._offloaded(path, block, weight)
        placed = moved(weight, self.device)
        return _fetch(plain(placed.weight(self.dtype)) if _is_plain(placed) else placed)

    def _quantises(self, spec: LayerSpec, weight: Packed) -> bool:
        """Say whether a block's layer is to be rounded; the file may have done so already."""
        has_few_bits = not _is_plain(weight) and self.name != "nf4"
        is_large = spec.kind == "linear" and _size(spec) >= SMALLEST
        return self.name in FORMATS and is_large and not has_few_bits

    def _offloaded(self, path: str, block: str, weight: Packed) -> Fetch:
        host = plain(weight.weight(self.dtype)) if _is_plain(weight) else weight
        ring = self.ring
        if ring is None or any(type(part) is not Tensor for part in host.parts):
            return lambda dtype, device: moved(host, device).weight(dtype)
        for index, part in enumerate(host.parts):
            ring.add((path, index), pinned(part, self.device))
        self.sizes[block] = self.sizes.get(block, 0) + host.nbytes
        ring.ahead = max(self.sizes.values())

        def fetch(dtype: torch.dtype, device: torch.device) -> Tensor:
            parts = tuple(ring.fetch((path, index)) for index in range(len(host.parts)))
            return host.unpack(parts, dtype).to(device)

        return fetch


def moved(weight: Packed, device: torch.device) -> Packed:
    """Return a packed weight on `device`."""
    return Packed(tuple(part.to(device) for part in weight.parts), weight.unpack)


def _fetch(weight: Packed) -> Fetch:
    return lambda dtype, device: weight.weight(dtype).to(device)


def _is_plain(weight: Packed) -> bool:
    return len(weight.parts) == 1 and weight.parts[0].dtype in (torch.float32, torch.float16, torch.bfloat16)


def _size(spec: LayerSpec) -> int:
    return torch.Size(spec.shape).numel()


def bytes_of(specs: Mapping[str, LayerSpec], blocks: tuple[str, ...], store: str, dtype: torch.dtype) -> int:
    """Return how many bytes of the device the weights of these layers take, in one of STORES."""
    bits = {"fp8": 8.0, "int8": 8.0, "nf4": 4.13, "offload": 0.0}
    total = 0.0
    largest: dict[str, float] = {}
    for path, spec in specs.items():
        block = block_of(path, blocks)
        whole = _size(spec) * dtype.itemsize
        if block is None or store == "resident":
            total += whole
        elif store == "offload":
            largest[block] = largest.get(block, 0.0) + whole
        else:
            total += _size(spec) * bits[store] / 8 if spec.kind == "linear" else whole
    return int(total + 2 * max(largest.values(), default=0.0))  # the block in use and the one on its way
