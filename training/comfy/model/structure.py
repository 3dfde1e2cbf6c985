"""What a network is made of, as a digest: classes, settings and shapes, no numbers."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from torch import nn

from ...memory.alike import settings_and_shapes
from .fingerprint import settings


def structure(networks: Mapping[str, nn.Module], patched: Iterable[str], options: Mapping[str, Any]) -> str:
    """Return a digest of all that decides which tensors a step makes, given its inputs.

    `patched` are the names of weights with patches, `options` the transformer options of the MODEL. The code
    of ComfyUI's classes counts by the size and date of its files.
    """
    state = hashlib.blake2b(digest_size=16)
    for name, network in networks.items():
        state.update(f"{name};".encode())
        for path, module in network.named_modules():
            kind = type(module)
            state.update(
                repr((path, _code(kind.__module__, kind.__qualname__), settings_and_shapes(module))).encode()
            )
    state.update(repr((sorted(patched), list(settings(options)))).encode("utf-8", "surrogatepass"))
    return state.hexdigest()


@cache
def _code(module: str, name: str) -> tuple[Any, ...]:
    """Return the name of a class, and size and date of its file."""
    try:
        file = os.stat(inspect.getfile(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # made in memory
        return module, name
    return module, name, file.st_size, file.st_mtime_ns
