"""Training states on disk: a folder with tensors (safetensors) and `state.json`, written whole or not at all.

`state.json` is the only commit point: it names the file of tensors and is replaced atomically, after that
file is on the disk. So whenever a process is killed, the folder holds the state before or after a save.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..config import AdapterConfig, from_dict, to_dict
from ..files.input_file import parse_json, require_ordinary
from ..files.text import require_letters
from ..files.whole_file import commit, remove_leftovers, temporary_in, whole_file
from ..state import LossScale, OptimizerState, TrainState
from ..user_error import FileError, UserError

FORMAT = 1


@dataclass(frozen=True)
class StateHandle:
    """A training state on disk: what travels on a wire, at no cost in memory."""

    path: Path
    step: int
    digest: str
    """Of the contents: equal states have equal digests."""

    @property
    def adapter(self) -> AdapterConfig:
        """The adapter's settings, without reading the tensors. Raises UserError as `load` does."""
        return from_dict(AdapterConfig, self._values()["adapter"])

    def load(self) -> TrainState:
        """Return the state. Raises UserError when it is missing, damaged, or replaced by another one."""
        self._values()
        return load_state(self.path)

    def _values(self) -> dict[str, Any]:
        values = read_values(self.path)
        if values.get("digest") != self.digest:
            raise UserError(
                f"{self.path}: another training state has been written here since; queue the graph again."
            )
        return values


def save_state(state: TrainState, folder: Path) -> StateHandle:
    """Write `state` to `folder`, which keeps its present state until the new one is on the disk.

    Raises OSError when the disk is full or the folder not writable; the present state then stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    with temporary_in(folder) as temporary:
        _save_tensors({name: tensor.contiguous() for name, tensor in _tensors(state).items()}, temporary)
        digest = _digest(temporary, _values(state))
        tensors = folder / f"state-{digest[:16]}.safetensors"
        if not tensors.exists() or _digest(tensors, _values(state)) != digest:
            commit(temporary, tensors)
    values = {"format": FORMAT, "digest": digest, "tensors": tensors.name, **_values(state)}
    write_text(folder / "state.json", json.dumps(values, indent=1))
    for old in folder.glob("state-*.safetensors"):
        if old != tensors:
            # Windows cannot remove a file that is mapped into memory; the next save will.
            with contextlib.suppress(OSError):
                old.unlink()
    return StateHandle(folder, state.step, digest)


def open_state(folder: Path) -> StateHandle:
    """Return a handle to the state in `folder`, after checking the contents against their digest.

    Raises UserError that names the folder, when it holds no state or a damaged one.
    """
    values = read_values(folder)
    contents = {key: value for key, value in values.items() if key not in ("format", "digest", "tensors")}
    digest = _digest(_tensor_file(folder, values), contents)
    if digest != values.get("digest") or type(values.get("step")) is not int:
        raise UserError(
            f"{folder}: the training state is damaged (its contents do not match their digest); go on "
            "from an earlier one."
        )
    return StateHandle(folder, values["step"], digest)


def load_state(folder: Path) -> TrainState:
    """Return the state that `save_state` wrote to `folder`. Raises UserError when it cannot be read."""
    values = read_values(folder)
    try:
        tensors = load_file(_tensor_file(folder, values))
        optimizer = OptimizerState(
            values["optimizer_name"],
            _under("optimizer/", tensors),
            values["optimizer"],
            tuple(values["optimizer_groups"]),
        )
        return TrainState(
            step=int(values["step"]),
            adapter=from_dict(AdapterConfig, values["adapter"]),
            base=str(values["base"]),
            weights=_under("weights/", tensors),
            optimizer=optimizer,
            losses=tuple(values["losses"]),
            family=values["family"],
            notes=values["notes"],
            ema=_under("ema/", tensors),
            validations=tuple((int(step), float(loss)) for step, loss in values["validations"]),
            validated_on=values.get("validated_on", ""),
            loss_scale=LossScale(**values["loss_scale"]) if values["loss_scale"] else None,
        )
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: the training state cannot be read ({error!r}).") from error


def size_in_bytes(state: TrainState) -> int:
    """Return how many bytes `state` takes on the disk, closely."""
    tensors = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(state).values())
    return tensors + 32 * len(state.losses) + 256 * len(state.weights)


def remove_state(folder: Path) -> None:
    """Remove a state and its folder. Killed in between, this leaves a folder without `state.json`."""
    with contextlib.suppress(OSError):
        (folder / "state.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def read_values(folder: Path) -> dict[str, Any]:
    """Return the contents of `state.json`. Raises UserError when it cannot be read or is not a state's."""
    try:
        values = read_object(folder / "state.json")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: no training state here ({error}). If you deleted it, free ComfyUI's model and node "
            "cache and queue the graph again to train it anew."
        ) from error
    if values.get("format") != FORMAT:
        raise UserError(f"{folder}: not a Graft training state of format {FORMAT}.")
    return values


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError, and UserError when the file holds something else."""
    require_ordinary(path)
    values = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise UserError(f"it holds {type(values).__name__}, not an object")
    return values


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors; errors of the disk that safetensors reports, like "no space left", become OSErrors."""
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise FileError(f"{path.parent}: {error}") from error


def _tensors(state: TrainState) -> dict[str, Tensor]:
    parts = {"weights": state.weights, "optimizer": state.optimizer.tensors, "ema": state.ema}
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def _values(state: TrainState) -> dict[str, Any]:
    return {
        "step": state.step,
        "adapter": to_dict(state.adapter),
        "base": state.base,
        "optimizer_name": state.optimizer.name,
        "optimizer": dict(state.optimizer.values),
        "optimizer_groups": [dict(group) for group in state.optimizer.groups],
        "losses": list(state.losses),
        "family": state.family,
        "notes": dict(state.notes),
        "validations": [list(entry) for entry in state.validations],
        "validated_on": state.validated_on,
        "loss_scale": to_dict(state.loss_scale) if state.loss_scale else None,
    }


def _tensor_file(folder: Path, values: Mapping[str, Any]) -> Path:
    return folder / Path(str(values.get("tensors"))).name


def _digest(tensors: Path, values: Mapping[str, Any]) -> str:
    try:
        require_letters(tensors.name, "the name of its tensors' file")
        require_ordinary(tensors)
        digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16)
        with tensors.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: a name that is impossible for a file
        raise UserError(f"{tensors.parent}: the training state cannot be read ({error}).") from error
    return digest.hexdigest()


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
