"""Training states on disk: a folder with `state.safetensors` and `state.json`, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import AdapterConfig, from_dict, to_dict
from .optimizer import OptimizerState
from .state import TrainState

FORMAT = 1


@dataclass(frozen=True)
class StateHandle:
    """A training state that lies on disk: what travels on a wire, at no cost in memory."""

    path: Path
    step: int
    digest: str
    """Of the state's contents: equal states have equal digests."""

    def load(self) -> TrainState:
        return load_state(self.path)


def save_state(state: TrainState, folder: Path) -> StateHandle:
    """Write `state` as `folder`, replacing what lies there only once everything is on the disk.

    Raises OSError when the disk is full or the folder cannot be written; an earlier state there is then untouched.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tensors = {f"weights/{name}": tensor for name, tensor in state.weights.items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in state.optimizer.tensors.items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary / "state.safetensors")
        digest = _digest(temporary / "state.safetensors", _values(state))
        text = json.dumps({"format": FORMAT, "digest": digest, **_values(state)}, indent=1)
        (temporary / "state.json").write_text(text, encoding="utf-8")
        for path in temporary.iterdir():
            _flush(path)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return StateHandle(folder, state.step, digest)


def open_state(folder: Path) -> StateHandle:
    """Return a handle to the state in `folder`, its contents checked against the digest they were written with.

    Raises ValueError naming the folder when it holds no state, or a damaged one.
    """
    values = _read_values(folder)
    digest = _digest(folder / "state.safetensors", {k: v for k, v in values.items() if k not in ("format", "digest")})
    if digest != values.get("digest"):
        raise ValueError(f"{folder}: the training state is damaged (its contents do not match their digest).")
    return StateHandle(folder, int(values["step"]), digest)


def load_state(folder: Path) -> TrainState:
    """Return the state that `save_state` wrote as `folder`.

    Raises ValueError when the folder holds no readable state.
    """
    values = _read_values(folder)
    try:
        tensors = load_file(folder / "state.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder}: the training state cannot be read ({error}).") from error
    return TrainState(
        step=int(values["step"]),
        adapter=from_dict(AdapterConfig, values["adapter"]),
        base=str(values["base"]),
        weights=_under("weights/", tensors),
        optimizer=OptimizerState(
            values["optimizer_name"], _under("optimizer/", tensors), values["optimizer"]
        ),
        losses=tuple(values["losses"]),
        family=values["family"],
        notes=values["notes"],
    )


def _values(state: TrainState) -> dict[str, Any]:
    return {
        "step": state.step,
        "adapter": to_dict(state.adapter),
        "base": state.base,
        "optimizer_name": state.optimizer.name,
        "optimizer": dict(state.optimizer.values),
        "losses": list(state.losses),
        "family": state.family,
        "notes": dict(state.notes),
    }


def _read_values(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: no training state here ({error}).") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{folder}: not a Graft training state of format {FORMAT}.")
    return values


def _digest(tensors: Path, values: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16)
    try:
        with tensors.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise ValueError(f"{tensors}: the training state cannot be read ({error}).") from error
    return digest.hexdigest()


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
