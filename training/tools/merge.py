"""Merge LoRAs into a checkpoint file, or one into a ComfyUI MODEL and out of it again.

A checkpoint is copied tensor by tensor, and its metadata remember what was merged. In a MODEL nothing is
subtracted: patches are added, and the very same patches are taken away. So merging twice, and unmerging what
was not merged, are errors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..adapters.dora import column_lengths
from ..lora_file import LoraFile, LoraLayer, read_lora
from ..model import OnProgress, no_progress
from ..tensor_file import TensorFile, as_bytes, write_streaming
from .files import check_output, unmatched_lines
from .names import match_weights

ATTACHMENT = "graft_merged"
METADATA = "graft_merged"


class AlreadyMerged(ValueError):
    """The LoRA is in these weights already."""


class NotMerged(ValueError):
    """The LoRA is not in these weights."""


def merge_files(
    base: Path,
    loras: Sequence[tuple[Path, float]],
    output: Path,
    *,
    on_progress: OnProgress = no_progress,
) -> str:
    """Write the checkpoint `base` with each (LoRA, strength) in it, in this order; return a report.

    At any time one weight is in memory, and the LoRAs. Weights without one, and all metadata, are copied byte
    for byte. Raises AlreadyMerged when the metadata name a LoRA, ValueError for files that do not fit.
    """
    check_output(output, [base, *(path for path, _ in loras)])
    weights = TensorFile(base)
    shapes = {key: entry.shape for key, entry in weights.entries.items()}
    history = json.loads(weights.metadata.get(METADATA, "[]"))
    changes: dict[str, list[tuple[LoraLayer, float]]] = {}
    report = []
    for path, strength in loras:
        file = read_lora(path)
        key = digest(file)
        if any(entry["digest"] == key for entry in history):
            raise AlreadyMerged(f"{path.name}: already merged into {base.name}.")
        history.append({"file": path.name, "digest": key, "strength": strength})
        matched = match_weights(file, shapes)
        for name, layer in matched.layers.items():
            changes.setdefault(name, []).append((layer, strength))
        report += [
            f"{path.name}: merged into {len(matched.layers)} weights",
            *unmatched_lines(matched.unmatched),
        ]
    done = 0

    def content(name: str) -> bytearray | memoryview:
        nonlocal done
        done += 1
        on_progress(done, len(shapes), name)
        if name not in changes:
            return weights.read(name)
        weight = weights[name]
        for layer, strength in changes[name]:
            weight = merged_weight(weight, layer, strength, name)
        return as_bytes(weight)

    metadata = {**weights.metadata, METADATA: json.dumps(history)}
    write_streaming(output, weights.entries, content, metadata)
    return "\n".join([*report, f"{output.name}: {output.stat().st_size / 1e9:.2f} GB"])


def merged_weight(weight: Tensor, layer: LoraLayer, strength: float = 1.0, name: str = "weight") -> Tensor:
    """Return one weight with `strength` times a LoRA's difference, in its dtype; as ComfyUI's loader does.

    Raises ValueError for a weight of 8 bits, in which a small difference is lost.
    """
    if not weight.is_floating_point() or weight.itemsize < 2:
        raise ValueError(
            f"{name}: a weight of type {weight.dtype} would round the LoRA away; use a bf16 or fp16 base."
        )
    base = weight.float()
    moved = base + layer.product().reshape(weight.shape)
    if "dora_scale" in layer.tensors:
        moved = moved * (
            layer.weights["magnitude"].float().reshape(1, -1, *(1,) * (weight.ndim - 2))
            / column_lengths(moved)
        )
    return (base + strength * (moved - base)).to(weight.dtype)


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
    """Return a clone of the patcher without what `merge_model` added under `key`; weights are then as before.

    Raises NotMerged when `key` is not in it.
    """
    merged = dict(model.attachments.get(ATTACHMENT, {}))
    if key not in merged:
        found = f"only {', '.join(known for known, _ in merged.values())}" if merged else "nothing"
        raise NotMerged(f"{name}: not merged into this model, which holds {found}.")
    clone = model.clone()
    for weight, added in merged.pop(key)[1].items():
        gone = {id(entry) for entry in added}
        clone.patches[weight] = [entry for entry in clone.patches[weight] if id(entry) not in gone]
        if not clone.patches[weight]:
            del clone.patches[weight]
    clone.patches_uuid = uuid.uuid4()  # by which ComfyUI knows that the weights have to be patched anew
    clone.set_attachments(ATTACHMENT, merged)
    return clone


def digest(file: LoraFile) -> str:
    """Return 16 hex digits of a LoRA's tensors, whatever the file is called."""
    found = hashlib.blake2b(digest_size=8)
    for name in sorted(file.layers):
        for suffix, tensor in sorted(file.layers[name].tensors.items()):
            found.update(f"{name}.{suffix}{tuple(tensor.shape)}{tensor.dtype}".encode())
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", type=Path, help="checkpoint or diffusion model, .safetensors")
    parser.add_argument("lora", type=Path, nargs="+", help="LoRA files, merged in this order")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the merged checkpoint")
    parser.add_argument("--strength", type=float, default=1.0, help="of every LoRA (default 1)")


def run(args: argparse.Namespace) -> None:
    print(merge_files(args.base, [(path, args.strength) for path in args.lora], args.output))
