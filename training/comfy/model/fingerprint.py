"""The fingerprint of a model: a digest of every number in its weights.

It is the same on every device, in every dtype that ComfyUI keeps the weights in, and with or without dynamic
VRAM.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CellType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import comfy.model_management
import torch
from torch import Tensor

from ...data.hashes import ContentHashes
from ...files.tensor_digest import SIZE, Known, digest_all, digest_file
from .. import paths
from .unload import is_loaded, unload
from .weights import is_gguf, named_numbers, to_ordinary

SAMPLING = ("multiplier", "shift", "sigma_data", "noise_scale", "audio_shift")
"""Attributes of ComfyUI's `model_sampling` that change its results, beside its buffers."""


def fingerprint(*parts: Any, patchers: tuple[Any, ...] = ()) -> str:
    """Return a digest of modules, patches and plain values: names, shapes and numbers of all tensors.

    `patchers` hold the modules' weights and are brought to rest first. Weights are digested in the dtype that
    the module computes with, even if its file has a wider one. May raise to cancel.
    """
    bring_to_rest(patchers)
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(b"part;")
        values = dict(_values(part, ""))
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        known = known_digests(part) if isinstance(part, torch.nn.Module) else {}
        with torch.no_grad():
            digests = digest_all(
                tensors, known, comfy.model_management.throw_exception_if_processing_interrupted
            )
        for name, value in values.items():
            state.update(f"{name}:".encode("utf-8", "surrogatepass"))
            state.update(digests[name] if name in digests else repr(value).encode())
    return state.hexdigest()


def bring_to_rest(patchers: tuple[Any, ...]) -> None:
    """Unload the models of these ModelPatchers, if one of them or a clone of it is loaded."""
    if any(map(is_loaded, patchers)):
        unload(*patchers)


def sampling_settings(sampling: Any) -> Mapping[str, Any]:
    """Return what changes the results of a `model_sampling`, beside its buffers: its classes and numbers."""
    kinds = [kind.__name__ for kind in type(sampling).__mro__ if not kind.__module__.startswith("torch")]
    numbers = {name: getattr(sampling, name, None) for name in SAMPLING}
    decide = {name: number for name, number in numbers.items() if number not in (None, 1.0)}
    return {"kinds": sorted({*kinds} - {"object"}), **decide}


def earlier_fingerprint(*parts: Any, patchers: tuple[Any, ...] = ()) -> str:
    """Return the fingerprint of version 0.1, which states saved then carry.

    It covers names, shapes and the first 4 KB of every n-th weight, as it is in memory.
    """
    bring_to_rest(patchers)
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(b"part;")
        tensors = dict(_earlier_tensors(part, ""))
        looked_at = {name for name, tensor in tensors.items() if tensor.ndim == 0}
        weights = [name for name, tensor in tensors.items() if tensor.ndim > 1 and name.endswith(".weight")]
        names = weights or list(tensors)
        looked_at |= set(names[:: max(1, len(names) // 16)])
        for name, tensor in tensors.items():
            digest.update(f"{name}:{tuple(tensor.shape)};".encode())
            if name in looked_at:
                with torch.no_grad():
                    start = tensor.detach().flatten()[:1024].to("cpu", torch.float32)
                digest.update(start.numpy().tobytes())
    return digest.hexdigest()


class FileDigests:
    """The digests of files' tensors, from the cache folder, or computed in the background."""

    def __init__(self, *files: Path) -> None:
        self._known: dict[bytes, bytes] = {}
        self._thread = threading.Thread(target=self._digest, args=(files,), name="graft digests", daemon=True)
        self._thread.start()

    def wait(self) -> Mapping[bytes, bytes]:
        """Return the known digests of the files' tensors, none of files that cannot be read.

        May raise to cancel.
        """
        while self._thread.is_alive():
            comfy.model_management.throw_exception_if_processing_interrupted()
            self._thread.join(0.1)
        return self._known

    def _digest(self, files: tuple[Path, ...]) -> None:
        known: dict[bytes, bytes] = {}
        with (
            _one_at_a_time,
            ContentHashes(
                paths.cache_folder(), "weights", lambda file, check: _to_bytes(digest_file(file))
            ) as hashes,
        ):
            for file in files:
                try:
                    read = _from_bytes(hashes.of(file))
                except (OSError, ValueError):
                    continue  # loading the file reports the error
                # A sample that two files share for different tensors identifies neither.
                known = {
                    key: value for key, value in {**known, **read}.items() if known.get(key, value) == value
                }
        self._known = known


def remember(module: torch.nn.Module | None, files: FileDigests) -> None:
    """Note that a module's weights were just loaded from these files, so they need not be read again.

    `module` is None for a part that the files don't have.
    """
    if module is not None:
        _FILES[module] = files


def known_digests(module: torch.nn.Module) -> Known:
    """Return the known digests of a module's tensors; what is added to them lives as long as the module."""
    known = _KNOWN.setdefault(module, {})
    if files := _FILES.pop(module, None):
        known.update(files.wait())
    return known


_one_at_a_time = threading.Lock()
_FILES: WeakKeyDictionary[torch.nn.Module, FileDigests] = WeakKeyDictionary()
_KNOWN: WeakKeyDictionary[torch.nn.Module, dict[bytes, bytes]] = WeakKeyDictionary()


def settings(part: Any, name: str = "", seen: frozenset[int] = frozenset()) -> Iterator[str]:
    """Yield the numbers and strings in nested options and in their functions' closures.

    Objects are left out: they may change while images are sampled, and the model would count as another one.
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


def _values(part: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield tensors and plain values in nested dicts, lists and objects (patches hold adapters that hold
    tuples of tensors).
    """
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, torch.nn.Module):
        yield from named_numbers(part)
    elif isinstance(part, Mapping):
        for key in sorted(part, key=str):
            yield from _values(part[key], f"{name}.{key}")
    elif isinstance(part, list | tuple):
        for index, item in enumerate(part):
            yield from _values(item, f"{name}.{index}")
    elif isinstance(part, int | float | str):
        yield name, float(part) if isinstance(part, int) else part
    elif hasattr(part, "weights"):  # a comfy.weight_adapter
        yield from _values(part.weights, f"{name}.{type(part).__name__}")


def _earlier_tensors(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under the names that `earlier_fingerprint` uses."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, torch.nn.Module):
        quantized = {key: to_ordinary(weight) for key, weight in part.named_parameters() if is_gguf(weight)}
        state = part.state_dict()
        weights = {**{key: t for key, t in state.items() if not (quantized and t.is_meta)}, **quantized}
        yield from _earlier_tensors(weights, f"{name}.{type(part).__name__}")
    elif isinstance(part, Mapping):
        for key in sorted(part, key=str):
            yield from _earlier_tensors(part[key], f"{name}.{key}")
    elif isinstance(part, list | tuple):
        for index, item in enumerate(part):
            yield from _earlier_tensors(item, f"{name}.{index}")
    elif isinstance(part, int | float):
        yield name, torch.tensor(float(part))
    elif hasattr(part, "weights"):
        yield from _earlier_tensors(part.weights, f"{name}.{type(part).__name__}")


def _to_bytes(known: Mapping[bytes, bytes]) -> bytes:
    return b"".join(sample + digest for sample, digest in known.items())


def _from_bytes(data: bytes) -> dict[bytes, bytes]:
    pairs = (data[i : i + 2 * SIZE] for i in range(0, len(data), 2 * SIZE))
    return {pair[:SIZE]: pair[SIZE:] for pair in pairs}
