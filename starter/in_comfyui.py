"""The starter in every ComfyUI with Graft: a tiny base model, its text encoder, captioned images.

So the template "01 First LoRA" runs without a download. The text encoder is made from a seed when first used.
"""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ..training.comfy.model.loading import model_path
from ..training.data.roots import KIND
from ..training.user_error import UserError
from .clip_l import is_current, write_clip_l

STARTER = Path(__file__).resolve().parent
BASE = STARTER / "base"
BASE_MODEL = "graft_tiny_sd3.safetensors"
TEXT_ENCODER = "graft_tiny_clip_l.safetensors"
LARGEST_BASE = 1 << 30
"""Bytes: above the demo's base and what is made of it, below every full-size model."""


def register() -> None:
    """Add the demo's model folder and its images to what ComfyUI finds."""
    for kind in ("checkpoints", "text_encoders"):
        folder_paths.add_model_folder_path(kind, str(BASE))
    folder_paths.add_model_folder_path(KIND, str(STARTER))


def text_encoders(files: list[str]) -> list[str]:
    """Return the text encoder files to choose from, the one made from a seed among them."""
    return sorted({*files, TEXT_ENCODER})


def with_text_encoder(model: str, chosen: list[str]) -> list[str]:
    """Return the text encoder files to load with `model`: the demo's own with its base, where none is chosen.

    It is written if it is not there: 248 MB, a few seconds. Raises UserError where it is chosen with a
    full-size model: it is made of random numbers, which only the demo's base has learned to read.
    """
    if model == BASE_MODEL and not chosen:
        chosen = [TEXT_ENCODER]
    if TEXT_ENCODER not in chosen:
        return chosen
    if model_path(model).stat().st_size > LARGEST_BASE:
        raise UserError(
            f"{TEXT_ENCODER} belongs to {BASE_MODEL}, not to {model}: set the text encoders to 'from "
            "checkpoint', or to the files of your model where it holds none."
        )
    there = folder_paths.get_full_path("text_encoders", TEXT_ENCODER)
    if there is None:
        _write_text_encoder()
    elif not is_current(Path(there)):  # an earlier version wrote it, for another base
        write_clip_l(Path(there))
    return chosen


def _write_text_encoder() -> None:
    """Write the demo's text encoder to the first folder that takes it. Raises UserError if none does."""
    refused = []
    for folder in dict.fromkeys([*map(Path, folder_paths.get_folder_paths("text_encoders")), BASE]):
        if folder.is_dir():
            try:
                write_clip_l(folder / TEXT_ENCODER)
                return
            except Exception as error:  # OSError, or what safetensors makes of it
                refused.append(f"{folder}: {error}")
    raise UserError(
        f"{TEXT_ENCODER} (248 MB) could be written to no folder of text encoders; make one of them writable, "
        "or free some space there:\n" + "\n".join(refused)
    )
