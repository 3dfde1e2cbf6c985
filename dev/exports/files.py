"""Files of the check of exports: the written LoRA, what a reader loads of it, and the trained weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ...training.adapters.build import restore_adapters
from ...training.frozen_base.frozen_layer import LayerSpec
from ...training.run.saved_state import load_state

WRITTEN = "written.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
"""Largest relative error of a layer's difference: rounding, and in bf16 that of up to four factors."""

KINDS = {2: "linear", 3: "conv1d", 4: "conv2d"}
"""By the number of a weight's axes. An embedding's difference is formed as a linear layer's."""


@dataclass(frozen=True)
class Written:
    """One file, or the words with which Save LoRA refuses to write it."""

    family: str
    case: str
    format: str
    dtype: str
    refused: str = ""

    def path(self, out: Path) -> Path:
        name = "".join(letter if letter.isalnum() else "-" for letter in self.format).strip("-")
        return out / self.family / self.case / f"{name}.{self.dtype}.safetensors"


@dataclass
class Loaded:
    """What a reader makes of one file."""

    file: Written
    reader: str
    layers: int = 0
    """That were trained."""
    lost: list[str] = field(default_factory=list)
    """Layers that the reader leaves as they are."""
    extra: list[str] = field(default_factory=list)
    """Weights that it changes and that were not trained."""
    warnings: list[str] = field(default_factory=list)
    worst: float = 0.0
    """Largest relative error of a layer's difference, which is that of `worst_layer`."""
    worst_layer: str = ""
    ratio: float = 0.0
    """Norm of all differences over that of the adapters' own."""
    error: str = ""

    @property
    def sound(self) -> bool:
        faults = (self.error, self.lost, self.extra, self.warnings)
        return not any(faults) and self.worst <= TOLERANCE[self.file.dtype]


def chosen(file: Written, globs: Iterable[str]) -> bool:
    """Return whether `--only` names the file's case."""
    return any(fnmatchcase(f"{file.family}/{file.case}", glob) for glob in globs)


def save(path: Path, rows: Iterable[Written | Loaded]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1), encoding="utf-8")


def read_results(out: Path) -> list[Loaded]:
    """Return what each reader found when it was last run."""
    paths = sorted(path for path in out.glob("*.json") if path.name != WRITTEN)
    rows = [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))]
    return [Loaded(**{**row, "file": Written(**row["file"])}) for row in rows]


def base_of(out: Path, family: str) -> dict[str, Tensor]:
    """Return the tiny model's weights: the network's by their paths, the text encoders' behind TEXT."""
    return load_file(out / family / "base.safetensors")


def differences(out: Path, file: Written, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what was trained: weight's path -> its difference, from the state beside the file."""
    state = load_state(out / file.family / file.case)
    paths = {name.rsplit(".", 1)[0] for name in state.weights}
    shapes = {path: tuple(base[f"{path}.weight"].shape) for path in paths}
    specs = {path: LayerSpec(KINDS[len(shape)], shape) for path, shape in shapes.items()}
    adapters = restore_adapters(specs, state.adapter, state.weights, torch.device("cpu"))
    with torch.no_grad():
        return {f"{path}.weight": adapter.delta(base[f"{path}.weight"]) for path, adapter in adapters.items()}


def compare(result: Loaded, trained: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> Loaded:
    """Complete `result` with what differs between these differences, by the same names."""
    norms = {name: float(difference.norm()) for name, difference in trained.items()}
    result.layers = len(trained)
    result.lost = sorted(trained.keys() - loaded.keys())
    result.extra = sorted(loaded.keys() - trained.keys())
    errors = {name: relative_error(loaded[name], trained[name]) for name in trained.keys() & loaded.keys()}
    result.worst_layer = max(errors, key=errors.__getitem__, default="")
    result.worst = errors.get(result.worst_layer, 0.0)
    norm = math.hypot(*(float(difference.norm()) for difference in loaded.values()))
    result.ratio = norm / math.hypot(*norms.values())
    return result


def relative_error(loaded: Tensor, trained: Tensor) -> float:
    """Return the norm of what differs over that of what was trained; infinite where they do not compare."""
    if loaded.shape != trained.shape:
        return math.inf
    error = float((loaded - trained).norm() / trained.norm())
    return math.inf if math.isnan(error) else error
