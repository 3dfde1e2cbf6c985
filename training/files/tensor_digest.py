"""Digests of tensors by their numbers, the same in every dtype that ComfyUI may keep a weight in.

SHA-256, because current CPUs compute it in hardware: one core reads 1 to 2 GB/s, and the tensors are spread
over all cores. The tensors of a file are digested once and remembered; a sample of its numbers identifies a
tensor among them.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .tensor_file import FORMATS, TensorFile, as_bytes

Known = MutableMapping[bytes, bytes]
"""Sample of a tensor -> digest of the whole tensor, for one file or one model. Never shared: two bases may
differ only in numbers outside the samples."""

SIZE = 16
"""Bytes of a digest."""
SAMPLED = 512
"""Numbers in a sample, evenly spaced."""
PIECE = 1 << 15
"""Numbers converted at once: few enough for a core's cache, and not to start PyTorch's threads."""
BATCH = 32
"""Tensors between two checks for Cancel."""
THREADS = min(8, os.cpu_count() or 1)

A = TypeVar("A")
B = TypeVar("B")


def tensor_digest(tensor: Tensor) -> bytes:
    """Return the digest of a tensor's shape and of all its numbers, on any device."""
    tensor = tensor.detach()
    return _digest(tensor, narrowest(tensor))


def sample_digest(tensor: Tensor) -> bytes:
    """Return the digest of a tensor's shape and of about `SAMPLED` of its numbers, floats as float32."""
    flat = tensor.detach().reshape(-1)
    picked = flat[:: max(1, len(flat) // SAMPLED)]
    state = hashlib.sha256(f"{tuple(tensor.shape)}".encode())
    state.update(as_bytes(picked.float() if picked.is_floating_point() else picked))
    return state.digest()[:SIZE]


def digest_all(
    tensors: Mapping[str, Tensor], known: Known, poll: Callable[[], object] = int
) -> dict[str, bytes]:
    """Return the digest of each tensor. Tensors missing from `known` are read, and added to it.

    `poll` is called regularly and may raise to cancel.
    """
    samples = {name: sample_digest(tensor) for name, tensor in tensors.items()}
    missing = [name for name, sample in samples.items() if sample not in known]
    digests: dict[str, bytes] = {}
    for names in _batches(missing):
        poll()
        digests.update(zip(names, _in_threads(tensor_digest, [tensors[name] for name in names]), strict=True))
    known.update(_unambiguous((samples[name], digest) for name, digest in digests.items()))
    return {name: digests.get(name) or known[sample] for name, sample in samples.items()}


def digest_file(path: Path) -> dict[bytes, bytes]:
    """Return sample -> digest for the tensors of a .safetensors file, read once from beginning to end.

    Raises UserError and OSError as `TensorFile` does.
    """
    file = TensorFile(path)
    readable = [n for n, entry in file.entries.items() if hasattr(torch, FORMATS[entry.format][1] or "-")]
    local = threading.local()

    def digests(name: str) -> tuple[bytes, bytes]:
        # One buffer for each thread: fresh memory for each tensor would cost more than its digest.
        size = file.entries[name].size
        if len(getattr(local, "buffer", b"")) < size:
            local.buffer = bytearray(size)
        tensor = file.read_into(name, local.buffer)
        return sample_digest(tensor), tensor_digest(tensor)

    return _unambiguous(_in_threads(digests, sorted(readable, key=lambda name: file.entries[name].start)))


def narrowest(tensor: Tensor) -> torch.dtype:
    """Return the first of bf16, fp16 and fp32 that represents a float tensor exactly, else its own dtype."""
    if tensor.is_floating_point():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if tensor.dtype == dtype or (_fits(tensor.reshape(-1)[:SAMPLED], dtype) and _fits(tensor, dtype)):
                return dtype
    return tensor.dtype


def _unambiguous(pairs: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return sample -> digest, without samples that tensors with different digests share."""
    digests: dict[bytes, set[bytes]] = {}
    for sample, digest in pairs:
        digests.setdefault(sample, set()).add(digest)
    return {sample: each.pop() for sample, each in digests.items() if len(each) == 1}


def _batches(names: list[str]) -> Iterator[list[str]]:
    yield from (names[i : i + BATCH] for i in range(0, len(names), BATCH))


def _in_threads(function: Callable[[A], B], values: Iterable[A]) -> list[B]:
    """Return function(value) for each value, in order."""
    with ThreadPoolExecutor(THREADS, "graft digest") as pool:
        return list(pool.map(function, values))


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `dtype` represents every number of the tensor, and none is NaN."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    pieces = (piece.to(wide) for piece in _pieces(tensor))
    return all(torch.equal(piece.to(dtype).to(wide), piece) for piece in pieces)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor.reshape(-1), PIECE)


def _digest(tensor: Tensor, dtype: torch.dtype) -> bytes:
    state = hashlib.sha256(f"{tuple(tensor.shape)} {dtype}".encode())
    for piece in [tensor] if tensor.dtype == dtype else _pieces(tensor):
        state.update(as_bytes(piece.to(dtype)))
    return state.digest()[:SIZE]
