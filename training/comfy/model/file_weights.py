"""Weights that stay in their .safetensors file, mapped into memory, instead of ComfyUI's copy of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import comfy.model_detection
import comfy.utils
import torch
from torch import Tensor, nn

from ...files.mapped_file import MappedFile
from ...files.tensor_file import FORMATS, TensorFile
from ...frozen_base.replace_forward import replaced
from ...memory.device_memory import free_bytes
from ...user_error import UserError
from .weights import replace, to_ordinary

SHARE = 0.8
"""Files above this share of the free host memory are mapped: ComfyUI's copy would not fit."""


def is_too_large(path: Path) -> bool:
    """Return whether a copy of a file would not fit into host memory."""
    free = free_bytes(torch.device("cpu"))
    return free is not None and path.stat().st_size > SHARE * free


def dtype_of(file: TensorFile) -> torch.dtype:
    """Return the dtype that most numbers of a file have."""
    sizes: Counter[str] = Counter()
    for entry in file.entries.values():
        sizes[entry.format] += entry.size
    return getattr(torch, FORMATS[sizes.most_common(1)[0][0]][1])  # type: ignore[no-any-return]


@contextmanager
def map_weights(file: TensorFile) -> Iterator[MappedFile]:
    """Let ComfyUI load `file` without copying weights that have the model's dtype already."""
    mapped = MappedFile(file)
    read, load = comfy.utils.load_torch_file, nn.Module.load_state_dict

    def read_mapped(path: str, *args: Any, return_metadata: bool = False, **options: Any) -> Any:
        if Path(path) != file.path:
            return read(path, *args, return_metadata=return_metadata, **options)
        tensors = dict(mapped.tensors)
        return (tensors, dict(mapped.metadata)) if return_metadata else tensors

    def assign(
        module: nn.Module, tensors: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> Any:
        own = module.state_dict()
        ready = {name: _in_dtype_of(own.get(name), tensor) for name, tensor in tensors.items()}
        return load(module, ready, strict=strict, assign=True)

    with (
        replaced(comfy.utils, "load_torch_file", read_mapped),
        replaced(nn.Module, "load_state_dict", assign),
    ):
        yield mapped


def _in_dtype_of(own: Tensor | None, tensor: Tensor) -> Tensor:
    plain = own is not None and own.is_floating_point() and tensor.is_floating_point()
    return tensor.to(own.dtype) if plain and own is not None else tensor


def remember_file(network: nn.Module, path: Path, mapped: MappedFile | None = None) -> None:
    """Note the file that a network's weights come from, and its mapping if they lie there."""
    _PATHS[network] = path
    if mapped is not None:
        _MAPPED[network] = mapped


def mapped_file(network: nn.Module) -> MappedFile | None:
    """Return the mapping that a network's weights lie in; None if they were copied."""
    return _MAPPED.get(network)


def move_to_file(network: nn.Module) -> MappedFile | None:
    """Replace a network's own copies of weights by the same numbers in its file; return the mapping.

    The network must be at rest. None if its file is unknown: another loader's, or no .safetensors. Raises
    UserError if the file has other numbers by now.
    """
    if network in _MAPPED or network not in _PATHS:
        return _MAPPED.get(network)
    mapped = MappedFile(TensorFile(_PATHS[network]))
    prefix = comfy.model_detection.unet_prefix_from_state_dict(dict(mapped.tensors))
    for path, module in network.named_modules():
        for name, own in module._parameters.items():
            where = f"{path}.{name}" if path else name
            there = mapped.tensors.get(f"{prefix}{where}", mapped.tensors.get(where))
            if own is None or there is None or (there.dtype, there.shape) != (own.dtype, own.shape):
                continue
            if not torch.equal(to_ordinary(own), there):
                raise UserError(
                    f"{mapped.path.name}: {where} has other numbers in the file than in memory: the file "
                    "was changed since it was loaded. Load the base again, then queue again."
                )
            replace(module, name, there)
    _MAPPED[network] = mapped
    return mapped


_PATHS: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()
_MAPPED: WeakKeyDictionary[nn.Module, MappedFile] = WeakKeyDictionary()
