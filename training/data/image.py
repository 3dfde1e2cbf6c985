"""Reading one image file: whatever it holds, upright sRGB comes out, then the crop at its bucket's size.

The one rule: every file that cannot be used raises BadImage with a reason a person can act on; nothing is
half read.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageColor, UnidentifiedImageError

from .bucket import Box, Size

EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".gif"))
MIN_SIDE = 8
"""Pixels. Smaller images carry nothing to learn from; they are thumbnails or placeholders."""
MAX_PIXELS = 178_956_970
"""Pillow's limit against decompression bombs, kept here because other software in the process may lift it."""

# Others (EPS starts Ghostscript, PDF, FITS, ...) have no place in a training folder.
_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "DIB", "TIFF", "GIF")
_DEEP_GRAY = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation (tag 274) -> what turns the image upright."""

Pixels = NDArray[np.float32]


class BadImage(ValueError):
    """A file that cannot be used; the message is the reason, without the file's name."""


@dataclass(frozen=True)
class Header:
    """What is known of an image without decoding it."""

    width: int
    """Pixels, upright."""
    height: int
    has_alpha: bool


@dataclass(frozen=True)
class Picture:
    """An upright image.

    Three colour planes in one RGB image (8 bit), or one float plane a channel in 0..1.
    """

    planes: tuple[Image.Image, ...]
    alpha: Image.Image | None = None
    """Mode L, opaque is white."""

    @property
    def size(self) -> Size:
        return self.planes[0].size

    def crop(self, box: Box, size: Size) -> Pixels:
        """Return the box, resized with Lanczos, as (H, W, 3) float32 in 0..1."""
        planes = [np.asarray(plane.resize(size, Image.Resampling.LANCZOS, box=box)) for plane in self.planes]
        if len(planes) == 1 and planes[0].ndim == 3:
            return planes[0].astype(np.float32) / np.float32(255)
        pixels = np.stack(planes * 3 if len(planes) == 1 else planes, axis=-1)
        return np.clip(_float32(pixels), np.float32(0), np.float32(1))


def read_header(path: Path) -> Header:
    """Return size and kind of an image file, decoding it only if its end looks cut off.

    Raises BadImage if it cannot be used, OSError if it cannot be read.
    """
    with _opened(path) as image:
        width, height = image.size
        _check_size(width, height)
        if _upright(image) in (5, 6, 7, 8):
            width, height = height, width
        header = Header(width, height, _has_alpha(image))
        if not _looks_complete(path, image.format):
            _decode(image)
        return header


def read_picture(path: Path, *, background: str = "#ffffff") -> Picture:
    """Return an image file upright, in sRGB, an animation's first frame, transparency laid on `background`.

    Raises BadImage if it cannot be used, OSError if it cannot be read.
    """
    with _opened(path) as image:
        _check_size(*image.size)
        turn = _UPRIGHT.get(_upright(image))
        _decode(image)
        try:
            planes, alpha = _colour(image, background)
        except (ValueError, OSError) as error:
            raise BadImage(f"colours cannot be converted from {image.mode} to RGB ({error})") from error
        if turn is not None:
            planes = tuple(plane.transpose(turn) for plane in planes)
            alpha = alpha.transpose(turn) if alpha is not None else None
        return Picture(planes, alpha)


def read_mask(path: Path) -> Image.Image:
    """Return a mask file upright as mode L, white where the picture counts. Raises as `read_picture` does."""
    picture = read_picture(path, background="#000000")
    if picture.planes[0].mode == "F":
        return _plane_from(np.asarray(picture.planes[0])).point(lambda value: value * 255).convert("L")
    return picture.planes[0].convert("L")


def picture_from_array(pixels: Pixels, *, background: str = "#ffffff") -> Picture:
    """Return an in-memory image (H, W, 3 or 4) float32 in 0..1 as a Picture, not rounded to 8 bits."""
    alpha = None
    if pixels.shape[2] == 4:
        opacity: Pixels = np.clip(pixels[:, :, 3:], 0, 1)
        paper: Pixels = np.array(ImageColor.getrgb(background), np.float32) / np.float32(255)
        alpha = mask_from_array(opacity[:, :, 0])
        pixels = pixels[:, :, :3] * opacity + paper * (1 - opacity)
    return Picture(tuple(_plane_from(pixels[:, :, channel]) for channel in range(3)), alpha)


def mask_from_array(mask: Pixels) -> Image.Image:
    """Return a mask (H, W) in 0..1 as an image of mode L."""
    return Image.fromarray((np.clip(mask, 0, 1) * 255 + 0.5).astype(np.uint8))


def crop_mask(mask: Image.Image, image_size: Size, box: Box, size: Size) -> NDArray[np.uint8]:
    """Return the part of a mask under the image's crop, averaged to `size` (the latent's), as (H, W) uint8.

    The mask may be larger or smaller than the image but must have its shape. Raises BadImage if not.
    """
    across, down = mask.width / image_size[0], mask.height / image_size[1]
    if abs(across / down - 1) > 0.02 + 1 / min(mask.size):
        raise BadImage(
            f"the mask is {mask.width} x {mask.height} px and the image {image_size[0]} x {image_size[1]}; "
            "draw the mask in the image's shape"
        )
    scaled = (
        box[0] * across,
        box[1] * down,
        min(box[2] * across, mask.width),
        min(box[3] * down, mask.height),
    )
    return np.asarray(mask.resize(size, Image.Resampling.BOX, box=scaled))


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open an image; every way in which its content can be wrong becomes BadImage."""
    try:
        if path.stat().st_size == 0:
            raise BadImage("the file is empty (0 bytes)")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large photos and odd EXIF blocks are no reason to alarm anybody
            with Image.open(path, formats=_formats()) as image:
                yield image
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
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        IndexError,
        TypeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        # Pillow's decoders raise all of these on damaged files (python-pillow/Pillow#4343).
        raise BadImage(f"damaged or not readable ({error})") from error


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    """Return those of _FORMATS that this Pillow knows; it fails on a name that it does not."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _decode(image: Image.Image) -> None:
    try:
        image.load()
    except Image.DecompressionBombError:
        raise
    except Exception as error:  # decoders of damaged files raise nearly anything; see _opened
        raise BadImage(f"truncated or damaged ({error})") from error


def _check_size(width: int, height: int) -> None:
    if min(width, height) < MIN_SIDE:
        raise BadImage(f"{width} x {height} px is too small; at least {MIN_SIDE} px a side")
    if width * height > MAX_PIXELS:
        raise BadImage(
            f"{width} x {height} px is more than {MAX_PIXELS // 1_000_000} million pixels; make it smaller"
        )


def _not_an_image(path: Path) -> str:
    start = path.open("rb").read(16)
    if start[4:8] == b"ftyp" and start[8:12] in (b"heic", b"heix", b"mif1", b"msf1", b"hevc"):
        return "is a HEIC photo, which is not supported; convert it to JPEG or PNG"
    if start[4:8] == b"ftyp" and start[8:12] in (b"avif", b"avis"):
        return "is an AVIF image, which this Pillow cannot read; update Pillow or convert it to PNG"
    return f"is not an image, whatever its extension {path.suffix} says"


def _upright(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 is upright."""
    if image.format == "PNG" and "exif" not in image.info and "Raw profile type exif" not in image.info:
        return 1  # Pillow would decode the whole image to look for EXIF behind it
    try:
        return int(image.getexif().get(0x0112, 1))
    except (
        Exception
    ) as error:  # a damaged EXIF block raises nearly anything and says nothing about the pixels
        logging.debug("EXIF of %s cannot be read: %s", getattr(image, "filename", "image"), error)
        return 1


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _looks_complete(path: Path, format: str | None) -> bool:
    """Say whether the file's end is where its format puts it.

    Software appends to files, so False only asks for a look.
    """
    with path.open("rb") as file:
        head = file.read(12)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 64))
        tail = file.read()
    if format in ("JPEG", "MPO"):
        return tail.rstrip(b"\0").endswith(b"\xff\xd9")
    if format == "PNG":
        return b"IEND" in tail
    if format == "GIF":
        return tail.rstrip(b"\0").endswith(b";")
    if format == "WEBP":
        return int.from_bytes(head[4:8], "little") + 8 <= size
    if format in ("BMP", "DIB"):
        return int.from_bytes(head[2:6], "little") <= size
    return False


def _colour(image: Image.Image, background: str) -> tuple[tuple[Image.Image, ...], Image.Image | None]:
    if image.mode in _DEEP_GRAY:
        return (_plane_from(_unit_range(image)),), None
    if _has_alpha(image):
        full = image.convert("RGBA")
        alpha = full.getchannel("A")
        colour = _to_srgb(full.convert("RGB"), image.info.get("icc_profile"))
        paper = Image.new("RGB", image.size, background)
        paper.paste(colour, mask=alpha)
        return (paper,), alpha
    if image.mode not in ("RGB", "L", "CMYK"):
        image = image.convert("RGB") if image.mode != "P" else _with_info(image, image.convert("RGB"))
    return (_to_srgb(image, image.info.get("icc_profile")),), None


def _with_info(old: Image.Image, new: Image.Image) -> Image.Image:
    new.info.setdefault("icc_profile", old.info.get("icc_profile"))
    return new


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Return the image in sRGB, mode RGB. A missing or useless profile counts as sRGB, as in every viewer."""
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            converted = ImageCms.profileToProfile(
                image, source, ImageCms.createProfile("sRGB"), outputMode="RGB"
            )
            if converted is not None:
                return converted
        except (ImageCms.PyCMSError, OSError, ValueError, ImportError) as error:
            logging.warning("%s: colour profile ignored: %s", getattr(image, "filename", "image"), error)
    return image.convert("RGB")


def _unit_range(image: Image.Image) -> Pixels:
    """Return a gray image of more than 8 bits as (H, W) float32 in 0..1."""
    values = np.asarray(image, np.float32)
    top = 1 if image.mode == "F" else 65535
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > top:
        raise BadImage("has values that are neither 16 bits nor between 0 and 1; convert it to 8 or 16 bits")
    return _float32(values / top)


def _plane_from(values: Pixels) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(values, dtype=np.float32))


def _float32(values: NDArray[Any]) -> Pixels:
    return values.astype(np.float32, copy=False)
