"""A caption written by hand: into the .txt file beside its image, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from ..files.text import require_letters
from ..files.whole_file import whole_file
from ..user_error import UserError
from .caption import require_usable
from .caption_file import expected_file
from .config import DatasetConfig
from .folder import captions_at
from .latent_file import stem_of

EDITABLE = ("auto", "txt")
"""Sources of captions for which a .txt file counts."""


class Conflict(UserError):
    """The caption is another one by now."""


def write_caption(root: Path, name: str, text: str, before: str, config: DatasetConfig) -> str:
    """Write the caption of the image `name` in the dataset `root`, and return it as it is read again.

    `before` is the caption that the editor showed. Raises Conflict if that is not the one on disk, UserError
    for a caption that cannot be used, OSError if it cannot be written.
    """
    if config.caption.source not in EDITABLE:
        raise UserError(
            f"captions come from {config.caption.source!r} in Dataset Settings, so a .txt file would not "
            "count; set 'captions from' to auto to edit them here."
        )
    text = text.strip()
    require_letters(text, "the caption")
    require_usable((text,), config)
    now = next(iter(captions_at(root, name, config)), "")
    if now != before.strip():
        raise Conflict(f"{name}: its caption was changed elsewhere, to: {now or '(empty)'}")
    path = _text_file(root / name, config)
    with whole_file(path) as temporary:
        temporary.write_text(text + "\n" if text else "", encoding="utf-8", newline="\n")
    return next(iter(captions_at(root, name, config)), "")


def _text_file(image: Path, config: DatasetConfig) -> Path:
    """Return the caption file of an image: the one that is there, however its extension is written."""
    wanted = expected_file(stem_of(image.name) + image.suffix, config.caption)
    there = (path for path in image.parent.iterdir() if path.name[:-4] + path.name[-4:].lower() == wanted)
    return next(there, image.with_name(wanted))
