"""The embedded default: a tiny base model, its text encoder and captioned images, at hand in every ComfyUI
with Graft.

So the template "first_lora" runs without a download. The text encoder is made from a seed when it is first
chosen.
"""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ..demo.clip_l import write_clip_l
from ..training.comfy.paths import DATASET_ROOTS

DEMO = Path(__file__).resolve().parent.parent / "demo"
BASE = DEMO / "base"
TEXT_ENCODER = "graft_tiny_clip_l.safetensors"


def register() -> None:
    """Add the demo's model folder and its images to what ComfyUI finds."""
    for kind in ("checkpoints", "text_encoders"):
        folder_paths.add_model_folder_path(kind, str(BASE))
    folder_paths.add_model_folder_path(DATASET_ROOTS, str(DEMO))


def text_encoders(files: list[str]) -> list[str]:
    """Return the text encoder files to choose from, the one made from a seed among them."""
    return sorted({*files, TEXT_ENCODER})


def make_text_encoder(names: list[str]) -> None:
    """Write the demo's text encoder if it is chosen and not there: 248 MB, a few seconds."""
    if TEXT_ENCODER in names and folder_paths.get_full_path("text_encoders", TEXT_ENCODER) is None:
        folder = next(
            (Path(p) for p in folder_paths.get_folder_paths("text_encoders") if Path(p).is_dir()), BASE
        )
        write_clip_l(folder / TEXT_ENCODER)
