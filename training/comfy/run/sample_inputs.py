"""What samples of edits, and of clips with a first frame, are made from: shown beside them on Train Steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps
from torch import Tensor

from ...files.whole_file import whole_file

HEIGHT = 512
"""Pixels."""


def save_input(references: Sequence[Tensor], path: Path) -> None:
    """Save a prompt's reference images, IMAGEs (1, H, W, C), side by side as one PNG, if there are any."""
    if not references:
        return
    pixels = [(image[0, ..., :3].clamp(0, 1) * 255).round().byte().cpu().numpy() for image in references]
    images = [ImageOps.contain(Image.fromarray(each), (8 * HEIGHT, HEIGHT)) for each in pixels]
    joined, left = Image.new("RGB", (sum(image.width for image in images), HEIGHT), "white"), 0
    for image in images:
        joined.paste(image, (left, 0))
        left += image.width
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        joined.save(temporary, "png")
