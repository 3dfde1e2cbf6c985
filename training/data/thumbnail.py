"""Small pictures of a dataset's images, drawn once and kept in the cache folder."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from ..files.whole_file import whole_file
from .image import Pixels, image_from_array, read_image
from .store import THUMBNAILS, note_use

SIDE = 320
"""Longest side in pixels."""


def thumbnail(path: Path, cache: Path) -> Path:
    """Return the JPEG file of an image's thumbnail in `cache`, drawn if the image is new or has changed.

    Raises BadImage if it cannot be used, OSError if it cannot be read or the cache cannot be written to.
    """
    info = path.stat()
    text = f"{os.path.abspath(path)}\0{info.st_size}\0{info.st_mtime_ns}\0{SIDE}"
    name = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    kept = cache / THUMBNAILS / name[:2] / f"{name}.jpg"
    if not kept.is_file():
        image = read_image(path, side=2 * SIDE)
        drawn = _jpeg(image.crop((0, 0, *image.size), _small(image.size)))
        kept.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(kept) as temporary:
            temporary.write_bytes(drawn)
    note_use(kept)
    return kept


def thumbnail_of(pixels: Tensor) -> bytes:
    """Return the JPEG of an image (H, W, 3 or 4) in 0..1."""
    image = image_from_array(pixels.numpy())
    return _jpeg(image.crop((0, 0, *image.size), _small(image.size)))


def _small(size: tuple[int, int]) -> tuple[int, int]:
    scale = min(1.0, SIDE / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _jpeg(pixels: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray((np.clip(pixels, 0, 1) * 255 + 0.5).astype(np.uint8)).save(file, "JPEG", quality=82)
    return file.getvalue()
