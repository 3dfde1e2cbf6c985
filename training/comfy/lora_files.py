"""LoRA files and checkpoints by ComfyUI's names for them: merged into a MODEL, or into new files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.model_management
import torch

from ..lora_file import read_lora
from ..memory.precision import DTYPES
from ..tensor_file import TensorFile
from ..tools.convert import convert_file
from ..tools.extract import extract_files
from ..tools.files import unmatched_lines
from ..tools.inspect import inspect, text
from ..tools.merge import digest, merge_files, merge_model, unmerge_model
from ..tools.resize import resize_file
from .loading import model_path
from .paths import checkpoint_path, listed, listed_file, lora_path
from .session import progress_bar

NONE = "none"
"""In place of a file that need not be chosen."""

AS_IT_IS = "as in the file"

OTHER_PATCHES = (".diff", ".diff_b", ".w_norm", ".b_norm", ".set_weight", ".reshape_weight")
"""Endings of the keys that ComfyUI's loader takes beside the factors of a LoRA."""


def lora_file_names() -> list[str]:
    return listed("loras")


def lora_file_path(name: str) -> Path:
    """Return the file that `lora_file_names` gives. Raises ValueError when it is not there."""
    return listed_file(("loras",), name)


def changed_at(*paths: Path) -> str:
    """Return what changes when one of these files does, for ComfyUI's cache."""
    found = (path.stat() for path in paths if path.exists())
    return " ".join(f"{stat.st_mtime_ns}-{stat.st_size}" for stat in found)


def merge_lora(
    model: Any, clip: Any, name: str, strength_model: float, strength_clip: float
) -> tuple[Any, Any, str]:
    """Return clones of MODEL and CLIP (or None) with the LoRA in them, and a report.

    Raises AlreadyMerged when it is in the MODEL, ValueError for a file that is not sound or fits nothing.
    """
    path = lora_file_path(name)
    file = read_lora(path)
    names: dict[str, Any] = comfy.lora.model_lora_keys_unet(model.model, {})
    if clip is not None:
        names = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, names)
    tensors = comfy.lora_convert.convert_lora(dict(TensorFile(path)))
    patches = comfy.lora.load_lora(dict(tensors), names, log_missing=False)
    if not patches:
        raise ValueError(
            f"{name}: no key fits this model ({next(iter(tensors))}, ...); was it made for another?"
        )
    merged = merge_model(model, patches, digest(file), name, strength=strength_model)
    if clip is not None:
        patcher = merge_model(clip.patcher, patches, digest(file), name, strength=strength_clip)
        clip = clip.clone()
        clip.patcher = patcher
    unmatched = _unmatched(tensors, patches, names)
    return (
        merged,
        clip,
        "\n".join([f"{name}: merged into {len(patches)} weights", *unmatched_lines(unmatched)]),
    )


def unmerge_lora(model: Any, clip: Any, name: str) -> tuple[Any, Any, str]:
    """Return clones of MODEL and CLIP (or None) as they were before `merge_lora`, and a report.

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
    with progress_bar() as on_progress, torch.inference_mode():
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
    """Write output/loras/<name>.safetensors; return its path and a report."""
    path = lora_path(name)
    number = None if dtype == AS_IT_IS else DTYPES[dtype]
    checkpoint = None if base == NONE else model_path(base)
    return path, convert_file(lora_file_path(lora), path, layout, dtype=number, base=checkpoint)


def inspect_lora(name: str) -> str:
    """Return a report on a LoRA file."""
    return text(inspect(read_lora(lora_file_path(name))))


def _unmatched(keys: Iterable[str], patches: dict[Any, Any], names: dict[str, Any]) -> list[str]:
    used = {key for patch in patches.values() for key in getattr(patch, "loaded_keys", ())}
    used |= {name + ending for name in names for ending in (*OTHER_PATCHES, ".alpha")}
    return [key for key in keys if key not in used]
