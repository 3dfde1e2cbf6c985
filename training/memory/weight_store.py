"""The storage of a frozen layer's weight, and the function (`Fetch`) that brings it to the device.

Only weights of the repeated blocks, which are most of the memory, are quantized or offloaded to host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from .. import distributed
from ..family import block_of
from ..files.mapped_file import MappedFile
from ..frozen_base.frozen_layer import Fetch, LayerSpec, Products
from ..model import OFFLOAD_ALL, OffloadOptions
from ..user_error import UserError
from .eight_bit import FORMATS as PRODUCTS
from .eight_bit import MULTIPLE, EightBit
from .offload import PinnedMemory, Ring, StreamCopier, has_streams
from .quantize import FORMATS, SMALLEST, Parts, StoredWeight, plain, quantize
from .sharding import SHARDED, ShardedBlocks
from .stream import FileSource, StagedCopier

STORES = ("resident", "fp8", "int8", "nf4", "offload", "stream")
"""On the device in the compute dtype; on the device in fewer bits; in host memory; in their file."""

EVERY_STORE = (*STORES, SHARDED)
"""Those, and the one that several processes share."""

COPIED = ("offload", "stream")
"""Stores that copy a block to the device at each use, one block ahead."""

UNPLACED = "unplaced"
"""Weights stay where the loader put them and move at each use: for estimates, which compute nothing, and for
reading every weight once."""

COMPUTES = ("full", "file", "int8", "fp8")
"""How weights are multiplied: in the compute dtype; those that their file has in 8 bits as they are; those of
the blocks in 8 bits too."""


@dataclass
class Store:
    """The weights of one network during one hold."""

    name: str
    """One of STORES."""
    blocks: tuple[str, ...]
    """Globs for the paths of the repeated blocks."""
    dtype: torch.dtype
    device: torch.device
    ring: Ring | None = None
    offload: OffloadOptions = OFFLOAD_ALL
    compute: str = "full"
    """One of COMPUTES."""
    products: dict[str, Products] = field(default_factory=dict)
    """Layer -> what it computes with instead of its weight; others are missing."""
    pinned: PinnedMemory = field(init=False)
    file: MappedFile | None = None
    """The file that the weights lie in; for "stream"."""
    source: FileSource = field(init=False)
    shards: ShardedBlocks | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    """Block -> bytes of its weights that are copied."""
    in_use: tuple[str, Parts] = "", ()
    """The layer copied last, and its copies: DoRA fetches each weight twice."""

    def __post_init__(self) -> None:
        if self.name not in (*EVERY_STORE, UNPLACED):
            raise UserError(f"base: {self.name!r} is unknown; choose one of {', '.join(EVERY_STORE)}.")
        self.pinned = self.offload.pinned or PinnedMemory(self.offload.host_reserve)
        self.source = FileSource(self.file)
        self.shards = ShardedBlocks(self.device) if self.name == SHARDED else None
        if self.name in COPIED and has_streams(self.device):
            stages = self.name == "stream"
            copier = StagedCopier(self.device, self.source) if stages else StreamCopier(self.device)
            self.ring = Ring(copier, 0)

    def release(self) -> None:
        """Free this hold's host memory; its layers must no longer be used."""
        self.in_use = "", ()
        if self.ring is not None:
            self.ring.clear()
        if self.shards is not None:
            self.shards.clear()
        if self.offload.pinned is None:
            self.pinned.release()

    def make_fetch(self, path: str, spec: LayerSpec, weight: StoredWeight) -> Fetch:
        """Store a layer's host weight; return the function that brings it to the device."""
        if self.name == UNPLACED:
            return lambda dtype, device: self._place(weight).dequantize(dtype).to(device)
        block = block_of(path, self.blocks)
        name = format_of(spec, self.name, self.compute) if block is not None else None
        if name is not None:
            whole = move_to(weight, self.device).dequantize(torch.float32)
            weight = quantize(whole.flatten(1), name, self.dtype)
        if self.shards is not None and block is not None:
            gather = self.shards.add(path, block, self._cast(weight))
            return lambda dtype, device: gather(dtype).to(device)
        if self.name in COPIED and block is not None and block not in self.offload.blocks_on_device:
            fetch = (self._offload if self.name == "offload" else self._stream)(path, block, spec, weight)
        else:
            placed = self._place(weight)
            self._multiply(path, spec, placed, lambda device: placed.parts)
            fetch = _resident_fetch(placed)
        return fetch if spec.kind == "linear" or name is None else _reshaped(fetch, spec.shape)

    def _multiply(
        self, path: str, spec: LayerSpec, weight: StoredWeight, parts: Callable[[torch.device], Parts]
    ) -> None:
        """Let a layer compute with its `weight` as it is stored, if `compute` says so; `parts` places it."""
        by = weight.multiplication
        if by is None or not is_multiplied(spec, self.compute):
            return
        self.products[path] = Products(
            lambda rows, bias: by.forward(parts(rows.device), rows, bias),
            lambda grads: by.backward(parts(grads.device), grads),
        )

    def _place(self, weight: StoredWeight) -> StoredWeight:
        placed = move_to(weight, self.device)
        return plain(placed.dequantize(self.dtype)) if _has_full_precision(placed) else placed

    def _offload(self, path: str, block: str, spec: LayerSpec, weight: StoredWeight) -> Fetch:
        ring = self.ring
        if ring is None:
            host = self._cast(weight)
            self._multiply(path, spec, host, lambda device: move_to(host, device).parts)
            return lambda dtype, device: move_to(host, device).dequantize(dtype)
        pinned = self.pinned.weights.get(path) or self._pin(path, self._cast(weight))
        return self._add_to(ring, path, block, spec, pinned)

    def _stream(self, path: str, block: str, spec: LayerSpec, weight: StoredWeight) -> Fetch:
        source, ring = self.source, self.ring
        for part in weight.parts:
            source.add(part)
        if ring is not None:
            return self._add_to(ring, path, block, spec, weight)

        def place(device: torch.device) -> StoredWeight:
            for part in weight.parts:
                source.note_use(block, part)
            return move_to(weight, device)

        self._multiply(path, spec, weight, lambda device: place(device).parts)
        return lambda dtype, device: place(device).dequantize(dtype)

    def _add_to(self, ring: Ring, path: str, block: str, spec: LayerSpec, host: StoredWeight) -> Fetch:
        """Add a layer's host weight to the ring; return the function that brings it to the device."""
        keys, dequantize = [(path, index) for index in range(len(host.parts))], host.dequantize_parts
        for key, part in zip(keys, host.parts, strict=True):
            ring.add(key, part)
        self.sizes[block] = self.sizes.get(block, 0) + host.nbytes
        # One block ahead: enough to hide the copies, and `weight_bytes` counts two blocks on the device.
        ring.ahead = max(self.sizes.values())
        self._multiply(path, spec, host, lambda device: self._copy(ring, path, keys))
        return lambda dtype, device: dequantize(self._copy(ring, path, keys), dtype).to(device)

    def _cast(self, weight: StoredWeight) -> StoredWeight:
        return plain(weight.dequantize(self.dtype)) if _has_full_precision(weight) else weight

    def _pin(self, path: str, weight: StoredWeight) -> StoredWeight:
        """Pin a layer's host weight, and remember it for the next hold if all of it could be pinned."""
        host = [part.cpu() for part in weight.parts]
        pinned = replace(weight, parts=tuple(map(self.pinned.take, host)))
        if all(copy is not part for copy, part in zip(pinned.parts, host, strict=True)):
            self.pinned.weights[path] = pinned
        return pinned

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _copy(self, ring: Ring, path: str, keys: Sequence[Hashable]) -> Parts:
        """Return a layer's weight on the device, copied now or by the previous fetch."""
        if self.in_use[0] != path:
            self.in_use = "", ()
            self.in_use = path, tuple(ring.fetch(key) for key in keys)
        return self.in_use[1]


def move_to(weight: StoredWeight, device: torch.device) -> StoredWeight:
    """Return a stored weight on `device`."""
    return replace(weight, parts=tuple(part.to(device) for part in weight.parts))


def _resident_fetch(weight: StoredWeight) -> Fetch:
    return lambda dtype, device: weight.dequantize(dtype).to(device)


def _reshaped(fetch: Fetch, shape: tuple[int, ...]) -> Fetch:
    return lambda dtype, device: fetch(dtype, device).view(shape)


def _has_full_precision(weight: StoredWeight) -> bool:
    return len(weight.parts) == 1 and weight.parts[0].dtype in (torch.float32, torch.float16, torch.bfloat16)


def is_quantized(spec: LayerSpec, store: str) -> bool:
    """Return whether `store` quantizes a block's layer. Only nf4 quantizes an already quantized one again."""
    is_large = spec.kind == "linear" and spec.numel >= SMALLEST
    return store in FORMATS and is_large and (spec.quantized_bytes is None or store == "nf4")


def format_of(spec: LayerSpec, store: str, compute: str) -> str | None:
    """Return the row of FORMATS that a block's layer is quantized to, to be stored or multiplied so."""
    if is_quantized(spec, store):
        return store
    can = spec.is_pointwise and spec.numel >= SMALLEST and spec.quantized_bytes is None
    return compute if compute in FORMATS and can and not is_uneven(spec) else None


def is_uneven(spec: LayerSpec) -> bool:
    """Return whether a weight's sides don't divide into the tiles that 8-bit numbers are multiplied in."""
    return any(side % MULTIPLE for side in spec.shape[:2])


def is_multiplied(spec: LayerSpec, compute: str) -> bool:
    """Return whether a layer whose weight is in 8 bits, by its file or the store, is multiplied as stored."""
    if compute == "full" or not spec.is_pointwise or is_uneven(spec):
        return False
    if spec.quantized_bytes is None:
        return compute in PRODUCTS
    return spec.format in PRODUCTS or (spec.format is not None and compute == "file")


def fake_products(
    path: str, spec: LayerSpec, blocks: tuple[str, ...], compute: str, device: torch.device
) -> Products | None:
    """Return products with a fake weight, in fake mode, for a layer that computes with its own."""
    in_block = block_of(path, blocks) is not None
    name = spec.format or (format_of(spec, "resident", compute) if in_block else None)
    if name is None or not is_multiplied(spec, compute):
        return None
    by = EightBit(name if name in PRODUCTS else "fp8")
    shape = spec.shape[0], spec.shape[1]
    parts = (
        torch.empty(shape, dtype=PRODUCTS[by.format].dtype, device=device),
        torch.empty(shape[0], 1, device=device),
    )
    return Products(lambda rows, bias: by.forward(parts, rows, bias), lambda grads: by.backward(parts, grads))


def weight_bytes(
    specs: Mapping[str, LayerSpec],
    blocks: tuple[str, ...],
    store: str,
    dtype: torch.dtype,
    compute: str = "full",
) -> int:
    """Return the bytes of the device that these layers' weights take in one of STORES and COMPUTES."""
    total = 0.0
    for path, spec in specs.items():
        in_block = block_of(path, blocks) is not None
        total += layer_bytes(spec, dtype, format_of(spec, store, compute) if in_block else None)
    if store in COPIED:
        sizes = block_bytes(specs, blocks, dtype, compute).values()
        total += 2 * max(sizes, default=0) - sum(sizes)  # the block in use and the next one
    if store == SHARDED:
        sizes = block_bytes(specs, blocks, dtype).values()
        total += 2 * max(sizes, default=0) - sum(sizes) * (1 - 1 / distributed.world())
    return int(total)


def block_bytes(
    specs: Mapping[str, LayerSpec], blocks: tuple[str, ...], dtype: torch.dtype, compute: str = "full"
) -> dict[str, int]:
    """Return path of each repeated block -> bytes of its weights, in the network's order."""
    sizes: dict[str, int] = {}
    for path, spec in specs.items():
        block = block_of(path, blocks)
        if block is not None:
            size = layer_bytes(spec, dtype, format_of(spec, "offload", compute))
            sizes[block] = sizes.get(block, 0) + int(size)
    return sizes


BITS = {"fp8": 8.0, "int8": 8.0, "nf4": 4.13}


def layer_bytes(spec: LayerSpec, dtype: torch.dtype, format: str | None = None) -> float:
    """Return the bytes of a layer's weight: in one of FORMATS, or as in its file, or else in `dtype`."""
    if format is not None:
        return spec.numel * BITS[format] / 8
    return spec.numel * dtype.itemsize if spec.quantized_bytes is None else spec.quantized_bytes
