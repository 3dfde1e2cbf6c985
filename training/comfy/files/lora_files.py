"""LoRA files and checkpoints by ComfyUI's names for them: merged into a MODEL, or into new files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.model_management
import torch

from ...files.lora.match import NO_LAYER, why_other
from ...files.lora.names import COMFY, network_names
from ...files.lora.peft import swap_halves
from ...files.lora.read import LoraFile, read_lora
from ...files.tensor_file import TensorFile
from ...memory.precision import DTYPES
from ...tools.convert import base_shapes, comfy_reads, convert_file
from ...tools.extract import extract_files
from ...tools.files import left_out_lines
from ...tools.inspect import inspect, text
from ...tools.merge import check_strength, digest, merge_files, merge_model, unmerge_model
from ...tools.resize import resize_file
from ...user_error import UserError
from ..model.loading import model_path
from ..paths import checkpoint_path, diffusers_path, lora_file_path, lora_path
from ..progress import progress_bar

NONE = "none"
"""Choice in place of an optional file."""

AS_IT_IS = "as in the file"

OTHER_PATCHES = (".diff", ".diff_b", ".w_norm", ".b_norm", ".set_weight", ".reshape_weight")
"""Endings of the keys that ComfyUI's loader takes beside the factors of a LoRA."""


def changed_at(*paths: Path) -> str:
    """Return a text that changes when one of these files does, for ComfyUI's cache."""
    stats = (path.stat() for path in paths if path.exists())
    return " ".join(f"{stat.st_mtime_ns}-{stat.st_size}" for stat in stats)


def merge_lora(
    model: Any, clip: Any, name: str, strength_model: float, strength_clip: float
) -> tuple[Any, Any, str]:
    """Return clones of MODEL and CLIP (or None) with the LoRA in them, and a report.

    Raises AlreadyMerged when the MODEL has it, UserError for a file that is damaged or matches nothing.
    """
    for strength in (strength_model, strength_clip):
        check_strength(strength)
    path = lora_file_path(name)
    file = read_lora(path)
    weights = dict(model.model.state_dict())
    names = {**_more_names(file, weights), **comfy.lora.model_lora_keys_unet(model.model, {})}
    if clip is not None:
        names = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, names)
        weights |= clip.cond_stage_model.state_dict()
    _require_shapes(file, names, weights)
    tensors = comfy.lora_convert.convert_lora(dict(TensorFile(path)))
    patches = comfy.lora.load_lora(dict(tensors), names, log_missing=False)
    if not patches:
        raise UserError(
            f"{name}: no key matches this model ({next(iter(tensors))}, ...); was it made for another?"
        )
    merged = merge_model(model, patches, digest(file), name, strength=strength_model)
    if clip is not None:
        patcher = merge_model(clip.patcher, patches, digest(file), name, strength=strength_clip)
        clip = clip.clone()
        clip.patcher = patcher
    other = why_other(file)
    left_out = {key: other.get(key, NO_LAYER) for key in _unmatched(tensors, patches, names)}
    count = len({key if isinstance(key, str) else key[0] for key in patches})
    report = [f"{name}: merged into {count} weights", *left_out_lines(left_out)]
    return merged, clip, "\n".join(report)


def unmerge_lora(model: Any, clip: Any, name: str) -> tuple[Any, Any, str]:
    """Return clones of MODEL and CLIP (or None) without a merged LoRA, and a report.

    Raises NotMerged when the LoRA is not in them.
    """
    key = digest(read_lora(lora_file_path(name)))
    restored = unmerge_model(model, key, name)
    if clip is not None:
        patcher = unmerge_model(clip.patcher, key, name)
        clip = clip.clone()
        clip.patcher = patcher
    return restored, clip, f"{name}: taken out; the weights are as before"


def merge_checkpoint(base: str, lora: str, strength: float, name: str) -> tuple[Path, str]:
    """Write output/checkpoints/<name>.safetensors; return its path and a report. See `merge_files`."""
    path = checkpoint_path(name)
    with progress_bar() as on_progress:
        loras = [(lora_file_path(lora), strength)]
        return path, merge_files(model_path(base), loras, path, on_progress=on_progress)


def extract_lora(base: str, tuned: str, rank: int, energy: float, dtype: str, name: str) -> tuple[Path, str]:
    """Write output/loras/<name>.safetensors; return its path and a report. 0 leaves rank or energy out."""
    path = lora_path(name)
    with progress_bar() as on_progress:
        report = extract_files(
            model_path(base),
            model_path(tuned),
            path,
            rank=rank or None,
            energy=energy or None,
            dtype=DTYPES[dtype],
            device=comfy.model_management.get_torch_device(),
            on_progress=on_progress,
        )
    return path, report


def resize_lora(lora: str, rank: int, energy: float, dtype: str, name: str) -> tuple[Path, str]:
    """Write output/loras/<name>.safetensors; return its path and a report. 0 leaves rank or energy out."""
    path = lora_path(name)
    size = {"rank": rank or None, "energy": energy or None}
    return path, resize_file(lora_file_path(lora), path, dtype=DTYPES[dtype], **size)  # type: ignore[arg-type]


def convert_lora(lora: str, layout: str, dtype: str, base: str, name: str) -> tuple[Path, str]:
    """Write output/loras/<name>.safetensors, or output/diffusers/<name>.safetensors where Load LoRA does not
    read the layout; return its path and a report."""
    torch_dtype = None if dtype == AS_IT_IS else DTYPES[dtype]
    checkpoint = None if base == NONE else model_path(base)
    path = lora_path(name) if comfy_reads(layout, base_shapes(checkpoint)) else diffusers_path(name)
    return path, convert_file(lora_file_path(lora), path, layout, dtype=torch_dtype, base=checkpoint)


def inspect_lora(name: str) -> str:
    """Return a report on a LoRA file."""
    return text(inspect(read_lora(lora_file_path(name))))


def _more_names(file: LoraFile, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what the file's names stand for in the network, in the form of ComfyUI's table."""
    keys = (key for key in weights if key.startswith(COMFY) and key.endswith(".weight"))
    shapes = {key.removeprefix(COMFY).removesuffix(".weight"): tuple(weights[key].shape) for key in keys}
    names: dict[str, Any] = {}
    methods = file.methods
    for name, target in network_names(shapes).items():
        if name in methods:
            key, rows = f"{COMFY}{target.key}.weight", (0, target.first, target.rows)
            whole = key if target.rows == shapes[target.key][0] else (key, rows)
            names[name] = (key, rows, swap_halves) if target.swapped else whole
    return names


def _require_shapes(file: LoraFile, names: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """Raise UserError for a layer without its weight's shape: ComfyUI would log it and patch nothing."""
    for name in (name for name in file.methods if name in names):
        key, rows = names[name][:2] if isinstance(names[name], tuple) else (names[name], None)
        if key not in weights or not weights[key].is_floating_point():  # quantized: a shape of its own
            continue
        shape = (rows[2] if rows else weights[key].shape[0], *weights[key].shape[1:])
        whole = file.whole.get(name, {})
        shapes = [tuple(whole[s].shape) for s in ("diff", "w_norm", "set_weight") if s in whole]
        expected = shape
        if name in file.layers:
            expected = shape[0], math.prod(shape[1:])
            shapes = [] if file.layers[name].is_for(*expected) else [file.layers[name].shape]
        if shapes and shapes[0] != expected:
            raise UserError(
                f"{file.name}: {name}: made for a weight of shape {shapes[0]}, but {key} has {expected}; "
                "choose the base that the file was trained on."
            )


def _unmatched(keys: Iterable[str], patches: dict[Any, Any], names: dict[str, Any]) -> list[str]:
    used = {key for patch in patches.values() for key in getattr(patch, "loaded_keys", ())}
    used |= {name + ending for name in names for ending in (*OTHER_PATCHES, ".alpha")}
    return [key for key in keys if key not in used]
