"""Safe opening of image files: their size and kind, and whether they are complete, mostly without decoding.

The one rule: every unusable file raises BadImage with a reason that a person can act on.
"""

from __future__ import annotations

import math
import operator
import os
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from PIL import Image, ImageFile, UnidentifiedImageError

from ..files.input_file import require_ordinary
from ..log import log
from ..user_error import UserError
from .bucket import Size

if TYPE_CHECKING:
    from PIL.TiffImagePlugin import TiffImageFile


EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".gif"))
HEIC = frozenset((".heic", ".heif"))
"""Photos of phones; read only if another package has added the format to Pillow (as pillow-heif does)."""
MIN_SIDE = 8
"""Pixels; smaller images are thumbnails or placeholders and teach nothing."""
MAX_PIXELS = 178_956_970
"""Pillow's limit against decompression bombs, which other software in the process may have lifted."""

# No others: EPS would start Ghostscript, and PDF, FITS and the like are no training images.
_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "HEIF", "BMP", "DIB", "TIFF", "GIF")


class BadImage(UserError):
    """A file that cannot be used; the message is the reason, without the file's name."""


@dataclass(frozen=True)
class Header:
    """The properties of an image file that need no decoding."""

    width: int
    """Pixels, upright."""
    height: int
    has_alpha: bool
    encoded: tuple[Size, ...] = ()
    """For a latent file: the image sizes in pixels that it has latents for."""


def read_header(path: Path) -> Header:
    """Return the header of an image file, decoding the file only if it looks truncated.

    Raises BadImage if it cannot be used, OSError if it cannot be read.
    """
    with open_image(path) as image:
        width, height = image.size
        require_size(width, height)
        if upright(image) in (5, 6, 7, 8):
            width, height = height, width
        header = Header(width, height, has_alpha(image))
        if not _looks_complete(path, image):
            decode(image)
        return header


def open_image(path: Path) -> Image.Image:
    """Return an image, not decoded yet, for the caller to close. Raises BadImage if it is unusable."""
    try:
        require_ordinary(path)
        if path.stat().st_size == 0:
            raise BadImage("the file is empty (0 bytes)")
        return Image.open(path, formats=_formats())
    except UnidentifiedImageError as error:
        raise BadImage(_not_an_image(path)) from error
    except Image.DecompressionBombError as error:
        raise BadImage(f"more than {MAX_PIXELS // 1_000_000} million pixels; make it smaller") from error
    except FileNotFoundError as error:
        raise BadImage("disappeared while the folder was being read") from error
    except PermissionError as error:
        raise BadImage("cannot be read: permission denied") from error
    except BadImage:
        raise
    except Exception as error:  # Pillow's parsers raise nearly anything on damaged headers
        raise BadImage(f"damaged or not readable ({error})") from error


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    """Return those of _FORMATS that this Pillow knows; it fails on unknown names."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def decode(image: Image.Image) -> None:
    """Read the pixels. Raises BadImage if they are not all there."""
    try:
        with _STRICT:
            image.load()
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        raise BadImage(f"truncated or damaged ({error})") from error


class _Strictness:
    """A context in which Pillow does not fill truncated images with gray, for any number of threads.

    Other software in the process may have set that, and gets its setting back.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._theirs = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._theirs, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = self._theirs


_STRICT = _Strictness()


def require_size(width: int, height: int) -> None:
    if min(width, height) < MIN_SIDE:
        raise BadImage(f"{width} x {height} px is too small; at least {MIN_SIDE} px a side")
    if width * height > MAX_PIXELS:
        raise BadImage(
            f"{width} x {height} px is more than {MAX_PIXELS // 1_000_000} million pixels; make it smaller"
        )


def _not_an_image(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(16)
    if start[4:8] == b"ftyp" and start[8:12] in (b"heic", b"heix", b"mif1", b"msf1", b"hevc"):
        return "is a HEIC photo, which is not supported; convert it to JPEG or PNG"
    if start[4:8] == b"ftyp" and start[8:12] in (b"avif", b"avis"):
        return "is an AVIF image, which this Pillow cannot read; update Pillow or convert it to PNG"
    return f"is not an image, whatever its extension {path.suffix} says"


def upright(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 is upright."""
    if image.format == "PNG" and "exif" not in image.info and "Raw profile type exif" not in image.info:
        return 1  # Pillow would decode the whole image to look for EXIF behind it
    try:
        return int(image.getexif().get(0x0112, 1))
    # A damaged EXIF block raises nearly anything and says nothing about the pixels.
    except Exception as error:
        log.debug("EXIF of %s cannot be read: %s", getattr(image, "filename", "image"), error)
        return 1


def has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _looks_complete(path: Path, image: Image.Image) -> bool:
    """Return whether the file ends where its format says.

    Some software appends data, so False only means that the image must be decoded to be sure.
    """
    with path.open("rb") as file:
        head = file.read(12)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 64))
        tail = file.read()
        if image.format in ("JPEG", "MPO"):
            return tail.rstrip(b"\0").endswith(b"\xff\xd9")
        if image.format == "PNG":
            return b"IEND" in tail
        if image.format == "GIF":
            return tail.rstrip(b"\0").endswith(b";")
        if image.format == "WEBP":
            return int.from_bytes(head[4:8], "little") + 8 <= size
        if image.format in ("BMP", "DIB"):
            return int.from_bytes(head[2:6], "little") <= size
        if image.format == "TIFF":
            return _tiff_end(cast("TiffImageFile", image)) <= size
        return image.format in ("AVIF", "HEIF") and _boxes_end(file) == size


def _tiff_end(image: TiffImageFile) -> float:
    """Return where the last strip or tile of a TIFF ends; infinity if unknown."""
    tags = image.tag_v2
    for offsets, counts in ((273, 279), (324, 325)):
        if offsets in tags and counts in tags:
            return float(max(map(operator.add, tags[offsets], tags[counts])))
    return math.inf


def _boxes_end(file: BinaryIO) -> int:
    """Return where the last box of an ISO media file (AVIF, HEIC) ends; -1 if unknown."""
    place = 0
    while len(head := _at(file, place, 16)) >= 8:
        length = int.from_bytes(head[:4], "big")
        length = int.from_bytes(head[8:16], "big") if length == 1 else length
        if length < 8:
            return -1
        place += length
    return place


def _at(file: BinaryIO, place: int, count: int) -> bytes:
    file.seek(place)
    return file.read(count)
