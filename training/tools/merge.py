"""Merging of LoRAs into a checkpoint file, or of one into a ComfyUI MODEL and out of it again.

A checkpoint is copied tensor by tensor, and its metadata lists what was merged. In a MODEL nothing is
subtracted: patches are added, and the same patches are removed. So merging twice, and unmerging what was not
merged, are errors.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..adapters.dora import apply_magnitude
from ..adapters.multiplied import Multiplied
from ..files.input_file import parse_json
from ..files.lora.match import IGNORED, NO_LAYER, Matched, WholeLayer
from ..files.lora.names import Shapes
from ..files.lora.peft import swap_halves
from ..files.lora.read import LoraFile, LoraLayer, read_lora
from ..files.tensor_file import TensorFile, as_bytes, write_streaming
from ..model import OnProgress, no_progress
from ..user_error import UserError
from .checkpoint import match_weights
from .files import check_output, left_out_lines

ATTACHMENT = "graft_merged"
METADATA = "graft_merged"


class AlreadyMerged(UserError):
    """The LoRA is in these weights already."""


class NotMerged(UserError):
    """The LoRA is not in these weights."""


def merge_files(
    base: Path,
    loras: Sequence[tuple[Path, float]],
    output: Path,
    *,
    on_progress: OnProgress = no_progress,
) -> str:
    """Write the checkpoint `base` with each (LoRA, strength) in it, in this order; return a report.

    One weight at a time is in memory, beside the LoRAs. Weights that no LoRA changes and all metadata are
    copied byte for byte. Raises AlreadyMerged when the metadata lists a LoRA, UserError for files that do not
    match.
    """
    check_output(output, [base, *(path for path, _ in loras)])
    weights = TensorFile(base)
    shapes = {key: entry.shape for key, entry in weights.entries.items()}
    history = _history_of(weights.metadata, base.name)
    changes: dict[str, list[Change]] = {}
    report = []
    for path, strength in loras:
        check_strength(strength)
        file = read_lora(path)
        key = digest(file)
        if any(entry["digest"] == key for entry in history):
            raise AlreadyMerged(f"{path.name}: already merged into {base.name}.")
        history.append({"file": path.name, "digest": key, "strength": strength})
        matched = match_weights(file, shapes)
        _require_computable(file, matched)
        additions, left_out = changes_of(matched, shapes, strength)
        for name, change in additions:
            changes.setdefault(name, []).append(change)
        report += [
            f"{path.name}: merged into {len({name for name, _ in additions})} weights",
            *left_out_lines(left_out),
            *_share_line(file, left_out),
        ]
    done = 0

    def content(name: str) -> bytearray | memoryview:
        nonlocal done
        done += 1
        on_progress(done, len(shapes), name)
        if name not in changes:
            return weights.read(name)
        weight = weights[name]
        before = weight
        for change in changes[name]:
            weight = change(weight, name)
        if not bool(torch.isfinite(weight).all()) and bool(torch.isfinite(before).all()):
            raise UserError(
                f"{name}: the result is too large for {weight.dtype}; merge at a lower strength, or into a "
                "base of bf16 or fp32 weights."
            )
        return as_bytes(weight)

    metadata = {**weights.metadata, METADATA: json.dumps(history)}
    write_streaming(output, weights.entries, content, metadata)
    return "\n".join([*report, f"{output.name}: {output.stat().st_size / 1e9:.2f} GB"])


def _history_of(metadata: Mapping[str, str], base: str) -> list[dict[str, Any]]:
    """Return the LoRAs that a checkpoint's metadata lists as merged. Raises UserError for any other value."""
    text = metadata.get(METADATA, "[]")
    try:
        history = parse_json(text)
        if not isinstance(history, list) or not all(isinstance(e, dict) and "digest" in e for e in history):
            raise UserError("not a list of entries with a digest")
    except UserError as error:
        raise UserError(
            f"{base}: {METADATA} in its metadata should list the LoRAs merged before, but is {text[:60]!r} "
            f"({error}). Choose the checkpoint as it was before merging, or remove {METADATA}."
        ) from error
    return history


def check_strength(strength: float) -> None:
    """Raise UserError unless a strength is a number."""
    if not math.isfinite(strength):
        raise UserError(f"strength: {strength} is not a finite number; 1 is as trained.")


Change = Callable[[Tensor, str], Tensor]
"""(weight, its key) -> the weight with a LoRA's difference."""


def changes_of(
    matched: Matched, shapes: Shapes, strength: float
) -> tuple[list[tuple[str, Change]], dict[str, str]]:
    """Return what a LoRA does to weights, by their keys, and the keys of the file that are left out.

    As in ComfyUI's loader, a bias may have a whole difference beside its weight's factors. Raises UserError
    for a whole difference that does not have its weight's shape.
    """
    changes: list[tuple[str, Change]] = [
        (key, partial(_add_layer, layer=layer, strength=strength)) for key, layer in matched.layers.items()
    ]
    left_out = dict(matched.left_out)
    for part in matched.whole:
        target, keys = part.target, _whole_keys(part)
        left_out |= {f"{part.name}.{s}": IGNORED for s in part.tensors if s not in keys and s != "alpha"}
        for suffix, key in keys.items():
            is_bias, all_rows = key != target.key, target.rows == shapes[target.key][0]
            if is_bias and not (all_rows and key in shapes):
                left_out[f"{part.name}.{suffix}"] = "are biases without a place in the base"
                continue
            first, rows = (0, shapes[key][0]) if is_bias else (target.first, target.rows)
            expected, shape = (rows, *shapes[key][1:]), tuple(part.tensors[suffix].shape)
            if shape != expected:
                raise UserError(
                    f"{matched.file}: {part.name}.{suffix}: shape {shape}, but {key} has {expected}; choose "
                    "the base that the file was trained on."
                )
            tensor = part.tensors[suffix]
            tensor = swap_halves(tensor) if target.swapped else tensor
            change = partial(_add_whole, tensor=tensor, first=first, strength=strength)
            changes.append((key, partial(change, replaces=suffix == "set_weight")))
    return changes, left_out


def _whole_keys(part: WholeLayer) -> dict[str, str]:
    """Return the suffixes that ComfyUI applies, the last one for each weight -> the weight's key."""
    key, tensors = part.target.key, part.tensors
    bias = f"{key.removesuffix('weight')}bias"
    weights = [suffix for suffix in ("w_norm", "diff", "set_weight") if suffix in tensors]
    biases = [s for s in ("b_norm", "diff_b") if s in tensors and (s == "diff_b" or "w_norm" in tensors)]
    return dict.fromkeys(weights[-1:], key) | dict.fromkeys(biases[-1:], bias)


def _add_whole(
    weight: Tensor, name: str, *, tensor: Tensor, first: int, strength: float, replaces: bool
) -> Tensor:
    base = _precise(weight, name)
    part = base[first : first + len(tensor)]
    part.copy_(tensor.float() if replaces else part + strength * tensor.float())
    return base.to(weight.dtype)


def _add_layer(weight: Tensor, name: str, *, layer: LoraLayer, strength: float) -> Tensor:
    return merge_weight(weight, layer, strength, name)


def merge_weight(weight: Tensor, layer: LoraLayer, strength: float = 1.0, name: str = "weight") -> Tensor:
    """Return one weight with `strength` times a LoRA's difference, in its dtype, as ComfyUI's loader does.

    Raises UserError for an 8-bit weight, whose rounding would lose a small difference.
    """
    base = _precise(weight, name)
    if issubclass(layer.method, Multiplied):
        parameters = {name: tensor.float() for name, tensor in layer.weights.items()}
        return (base + layer.scale * layer.method.change(parameters, base, strength)).to(weight.dtype)
    moved = base + layer.product().reshape(weight.shape)
    if layer.magnitude is not None:
        moved = apply_magnitude(moved, base, layer.magnitude, over_outputs=layer.over_outputs)
    return (base + strength * (moved - base)).to(weight.dtype)


def _precise(weight: Tensor, name: str) -> Tensor:
    """Return a copy of a weight in float32."""
    if not weight.is_floating_point() or weight.itemsize < 2:
        raise UserError(
            f"{name}: a weight of type {weight.dtype} would round the LoRA away; use a bf16 or fp16 base."
        )
    return weight.to(torch.float32, copy=True)


def _require_computable(file: LoraFile, matched: Matched) -> None:
    if not matched.others:
        return
    methods = Counter(file.others[name].method for name in matched.others)
    kinds = ", ".join(f"{count} of {method}" for method, count in methods.items())
    raise UserError(
        f"{file.name}: {len(matched.others)} of {len(file.methods)} layers cannot be merged into a file: "
        f"{kinds} ({', '.join(list(matched.others)[:3])}, ...). In a graph, Merge LoRA applies what ComfyUI "
        "knows of them, and Save Checkpoint writes it."
    )


def _share_line(file: LoraFile, left_out: Mapping[str, str]) -> list[str]:
    """Return a line with the share of the difference, by norm, that was left out; none where it is 0, or
    unknown because a method multiplies the base."""
    if any(layer.method.multiplies_base for layer in file.layers.values()):
        return []
    squares = {name: layer.square() for name, layer in file.layers.items()}
    lost = [
        n for n, layer in file.layers.items() if left_out.get(f"{n}.{next(iter(layer.tensors))}") == NO_LAYER
    ]
    for name, tensors in file.whole.items():
        parts = {s: float(t.double().square().sum()) for s, t in tensors.items() if s != "alpha"}
        squares[f"{name}.whole"] = sum(parts.values())
        if any(f"{name}.{suffix}" in left_out for suffix in parts):
            lost.append(f"{name}.whole")
    share = (sum(squares[name] for name in lost) / (sum(squares.values()) or 1.0)) ** 0.5
    return [f"That is {share:.1%} of its difference, by norm."] if lost else []


def merge_model(model: Any, patches: Mapping[Any, Any], key: str, name: str, *, strength: float = 1.0) -> Any:
    """Return a clone of a ComfyUI MODEL or CLIP patcher with `patches` (of `comfy.lora.load_lora`) at `key`.

    `name` is for people. The patcher that comes in is not changed. Raises AlreadyMerged when it has `key`.
    """
    merged = dict(model.attachments.get(ATTACHMENT, {}))
    if key in merged:
        raise AlreadyMerged(f"{name}: already merged into this model; unmerge it first.")
    clone = model.clone()
    before = {weight: len(entries) for weight, entries in clone.patches.items()}
    clone.add_patches(patches, strength)
    added = {weight: entries[before.get(weight, 0) :] for weight, entries in clone.patches.items()}
    merged[key] = (name, {weight: entries for weight, entries in added.items() if entries})
    clone.set_attachments(ATTACHMENT, merged)
    return clone


def unmerge_model(model: Any, key: str, name: str) -> Any:
    """Return a clone of the patcher without what `merge_model` added under `key`.

    Raises NotMerged when `key` is not in it.
    """
    merged = dict(model.attachments.get(ATTACHMENT, {}))
    if key not in merged:
        held = f"only {', '.join(known for known, _ in merged.values())}" if merged else "nothing"
        raise NotMerged(f"{name}: not merged into this model, which holds {held}.")
    clone = model.clone()
    for weight, added in merged.pop(key)[1].items():
        gone = {id(entry) for entry in added}
        clone.patches[weight] = [entry for entry in clone.patches[weight] if id(entry) not in gone]
        if not clone.patches[weight]:
            del clone.patches[weight]
    clone.patches_uuid = uuid.uuid4()  # so that ComfyUI patches the weights again
    clone.set_attachments(ATTACHMENT, merged)
    return clone


def digest(file: LoraFile) -> str:
    """Return 16 hex digits of a LoRA's tensors, whatever the file is called."""
    hasher = _hash_layers(file)
    whole = {f"{name}.{suffix}": t for name, tensors in file.whole.items() for suffix, t in tensors.items()}
    others = {key: t for other in file.others.values() for key, t in other.tensors.items()}
    for key, tensor in sorted((whole | others).items()):
        _add(hasher, key, tensor)
    return hasher.hexdigest()


def digest_of_layers(file: LoraFile) -> str:
    """Return 16 hex digits of the tensors that training can start from."""
    hasher = _hash_layers(file)
    for name, tensors in sorted(file.whole.items()):
        if "diff" in tensors and tensors["diff"].ndim >= 2:
            for suffix, tensor in sorted(tensors.items()):
                _add(hasher, f"{name}.{suffix}", tensor)
    return hasher.hexdigest()


def _hash_layers(file: LoraFile) -> hashlib.blake2b:
    hasher = hashlib.blake2b(digest_size=8)
    for name in sorted(file.layers):
        for suffix, tensor in sorted(file.layers[name].tensors.items()):
            _add(hasher, f"{name}.{suffix}", tensor)
    return hasher


def _add(hasher: hashlib.blake2b, key: str, tensor: Tensor) -> None:
    hasher.update(f"{key}{tuple(tensor.shape)}{tensor.dtype}".encode())
    hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
