"""Estimates of earlier runs, in one file of the cache folder: the same step is estimated once.

The key covers all that an estimate depends on: the network's modules and shapes, the adapters, the shapes of
the batch, mode, dtype and device, and the code that estimates. Whatever is wrong with the file, estimates are
computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import AdapterConfig
from ..files.whole_file import whole_file
from ..frozen_base.frozen_layer import LayerSpec
from ..log import log
from ..model import Batch, Denoiser
from .estimate import MASK, StepEstimate

MOST = 500
"""Estimates in the file; the oldest give way to new ones."""

ENGINE = Path(__file__).resolve().parents[1]
"""Its code is part of every key."""


class KnownEstimates:
    """A mapping of keys to estimates that outlives the process."""

    def __init__(self, folder: Path | None) -> None:
        """Use a file in `folder`; None remembers nothing."""
        self.file = None if folder is None else folder / "estimates.json"

    def recall(self, key: str) -> StepEstimate | None:
        """Return a remembered estimate; None if there is none that can be read."""
        try:
            return StepEstimate(**self._read()[key])
        except (KeyError, TypeError):
            return None

    def remember(self, key: str, estimate: StepEstimate) -> None:
        """Write an estimate into the file; if that fails, the next run computes it again."""
        if self.file is None:
            return
        known = {**self._read(), key: asdict(estimate)}
        newest = dict(list(known.items())[-MOST:])
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.file) as temporary:
                temporary.write_text(json.dumps(newest), encoding="utf-8")
        except OSError as error:
            log.debug("%s cannot be written (%s).", self.file, error)

    def _read(self) -> Mapping[str, Any]:
        try:
            known = json.loads(self.file.read_text(encoding="utf-8")) if self.file else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}


def estimate_key(
    denoiser: Denoiser,
    adapted: Mapping[str, LayerSpec],
    config: AdapterConfig,
    batch: Batch,
    mode: str,
    dtype: torch.dtype,
    compute: str = "full",
) -> str:
    """Return a digest of all that the estimate of a step depends on."""
    parts = (
        *(_code(), torch.__version__, denoiser.structure, denoiser.device.type, mode, dtype, compute, config),
        *(adapted.items(), _signature(batch)),
    )
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@cache
def _code() -> str:
    """Return a digest of the engine's code."""
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(ENGINE.rglob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


def _signature(batch: Batch) -> tuple[Any, ...]:
    """Return what a batch decides: shapes, the numbers that shapes may depend on, and texts to encode."""
    tensors = (batch.latents, batch.masks, batch.weights)
    slider = batch.slider and (batch.slider.positive, batch.slider.negative, batch.slider.neutral)
    others = [batch.preserved, *(slider or ())]
    return (
        *(None if tensor is None else tuple(tensor.shape) for tensor in tensors),
        [_seen(each) for each in batch.conditioning],
        [sorted(each) for each in batch.extras],
        batch.captions,
        *([(_seen(each.conditioning), each.texts) for each in others if each] if any(others) else ()),
        *(() if batch.opposite is None else _signature(batch.opposite)),
    )


def _seen(value: Any) -> Any:
    """Return what of a conditioning decides shapes: of a tensor its shape and dtype, whole numbers, and how
    much of a small one, maybe a mask, is not zero.
    """
    if isinstance(value, Mapping):
        return [(name, _seen(value[name])) for name in sorted(value)]
    if isinstance(value, list | tuple):
        return [_seen(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    numbers = [] if value.is_floating_point() else value.flatten().tolist()
    return tuple(value.shape), value.dtype, numbers, value.numel() <= MASK and int(value.count_nonzero())
