"""Merge a LoRA into weights, or into a ComfyUI MODEL, and take it out again exactly.

Nothing is subtracted: what was there before a merge is kept and put back. So merging twice, and unmerging
what was not merged, are errors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..adapters.dora import column_lengths
from ..lora_file import LoraFile, LoraLayer, read_lora, read_tensors, write_lora
from .names import match_weights

log = logging.getLogger(__name__)

ATTACHMENT = "graft_merged"
METADATA = "graft_merged"


class AlreadyMerged(ValueError):
    """The LoRA is in these weights already."""


class NotMerged(ValueError):
    """The LoRA is not in these weights."""


@dataclass(frozen=True)
class Merged:
    """Weights with LoRAs in them, and what was there before."""

    weights: Mapping[str, Tensor]
    originals: tuple[tuple[str, Mapping[str, Tensor]], ...]
    """One entry a merge, the latest last: (the LoRA's digest, the weights that it replaced)."""


def merge(weights: Mapping[str, Tensor] | Merged, file: LoraFile, *, strength: float = 1.0) -> Merged:
    """Return `weights` with `strength` times the LoRA in them, computed in float32 and kept in their own
    dtypes.

    Raises AlreadyMerged when this LoRA is in them, and ValueError when it does not fit them.
    """
    before = weights if isinstance(weights, Merged) else Merged(weights, ())
    key = digest(file)
    if key in dict(before.originals):
        raise AlreadyMerged(f"{file.name}: already merged into these weights; unmerge it first.")
    layers, unmatched = match_weights(file, before.weights)
    if unmatched:
        log.warning("Graft: %s: %d keys match nothing: %s", file.name, len(unmatched), ", ".join(unmatched))
    changed = {
        name: merged_weight(before.weights[name], layer, strength, name) for name, layer in layers.items()
    }
    originals = {name: before.weights[name] for name in changed}
    return Merged({**before.weights, **changed}, (*before.originals, (key, originals)))


def unmerge(merged: Merged | Mapping[str, Tensor], file: LoraFile) -> Merged:
    """Return the weights as they were before `file` was merged, bit for bit.

    Raises NotMerged when it is not in them, or when another LoRA was merged after it.
    """
    if not isinstance(merged, Merged) or digest(file) not in dict(merged.originals):
        raise NotMerged(f"{file.name}: not merged into these weights.")
    key, originals = merged.originals[-1]
    if key != digest(file):
        raise NotMerged(f"{file.name}: another LoRA was merged after it; unmerge that one first.")
    return Merged({**merged.weights, **originals}, merged.originals[:-1])


def merged_weight(weight: Tensor, layer: LoraLayer, strength: float = 1.0, name: str = "weight") -> Tensor:
    """Return one weight with `strength` times a LoRA's difference, in the weight's dtype; as ComfyUI's loader
    does.

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


def merge_model(model: Any, patches: Mapping[Any, Any], name: str, *, strength: float = 1.0) -> Any:
    """Return a clone of a ComfyUI MODEL or CLIP patcher with `patches` (of `comfy.lora.load_lora`) under
    `name`.

    The patcher that comes in is not changed. Raises AlreadyMerged when `name` is in it.
    """
    merged = dict(model.attachments.get(ATTACHMENT, {}))
    if name in merged:
        raise AlreadyMerged(f"{name}: already merged into this model; unmerge it first.")
    clone = model.clone()
    before = {key: len(entries) for key, entries in clone.patches.items()}
    clone.add_patches(patches, strength)
    added = {key: entries[before.get(key, 0) :] for key, entries in clone.patches.items()}
    merged[name] = {key: entries for key, entries in added.items() if entries}
    clone.set_attachments(ATTACHMENT, merged)
    return clone


def unmerge_model(model: Any, name: str) -> Any:
    """Return a clone of the patcher without what `merge_model` added under `name`; its weights are then as
    before.

    Raises NotMerged when `name` is not in it.
    """
    merged = dict(model.attachments.get(ATTACHMENT, {}))
    if name not in merged:
        found = f"only {', '.join(merged)}" if merged else "nothing"
        raise NotMerged(f"{name}: not merged into this model, which holds {found}.")
    clone = model.clone()
    for key, added in merged.pop(name).items():
        gone = {id(entry) for entry in added}
        kept = [entry for entry in clone.patches[key] if id(entry) not in gone]
        clone.patches[key] = kept
        if not kept:
            del clone.patches[key]
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
    weights, metadata = read_tensors(args.base, finite=False)
    history = json.loads(metadata.get(METADATA, "[]"))
    merged = Merged(weights, ())
    for path in args.lora:
        file = read_lora(path)
        if any(entry["digest"] == digest(file) for entry in history):
            raise AlreadyMerged(f"{path.name}: already merged into {args.base.name}.")
        merged = merge(merged, file, strength=args.strength)
        history.append({"file": path.name, "digest": digest(file), "strength": args.strength})
        print(f"{path.name}: merged into {len(merged.originals[-1][1])} weights")
    write_lora(args.output, merged.weights, {**metadata, METADATA: json.dumps(history)})
