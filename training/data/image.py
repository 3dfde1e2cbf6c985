"""Images of any file kind as upright sRGB, and their crops resized to a bucket.

The one rule: no precision is lost before the crop: 16-bit images and images from a graph stay floats.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageColor

from ..log import log
from .bucket import Box, Size
from .image_file import BadImage, decode, has_alpha, open_image, require_size, upright

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
"""EXIF orientation (tag 274) -> the transposition that turns the image upright."""

Pixels = NDArray[np.float32]


@dataclass(frozen=True)
class UprightImage:
    """An upright image: one plane of mode RGB, or one (gray) or three of mode F in 0..1."""

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
            return _float32(planes[0] / np.float32(255))
        pixels = np.stack(planes * 3 if len(planes) == 1 else planes, axis=-1)
        return _float32(np.clip(pixels, 0, 1))


def read_image(path: Path, *, background: str = "#ffffff", side: int = 0) -> UprightImage:
    """Return an image file, upright, in sRGB, with transparency over `background`; of animations the first
    frame.

    With `side`, a JPEG may be smaller than its file, with sides of that many pixels or more: fast to decode.

    Raises BadImage if it cannot be used, OSError if it cannot be read.
    """
    with open_image(path) as image:
        require_size(*image.size)
        turn = _UPRIGHT.get(upright(image))
        if side:
            image.draft(image.mode, (side, side))
        decode(image)
        try:
            planes, alpha = _color(image, background)
        except (ValueError, OSError) as error:
            raise BadImage(f"colors cannot be converted from {image.mode} to RGB ({error})") from error
        if turn is not None:
            planes = tuple(plane.transpose(turn) for plane in planes)
            alpha = alpha.transpose(turn) if alpha is not None else None
        return UprightImage(planes, alpha)


def read_mask(path: Path) -> Image.Image:
    """Return a mask file upright as mode L, white where the image counts. Raises as `read_image` does."""
    image = read_image(path, background="#000000")
    plane = image.planes[0]
    return mask_from_array(np.asarray(plane)) if plane.mode == "F" else plane.convert("L")


def image_from_array(pixels: Pixels, *, background: str = "#ffffff") -> UprightImage:
    """Return an in-memory image (H, W, 3 or 4) float32 in 0..1 without rounding to 8 bits."""
    alpha = None
    if pixels.shape[2] == 4:
        opacity: Pixels = np.clip(pixels[:, :, 3:], 0, 1)
        paper: Pixels = np.array(ImageColor.getrgb(background), np.float32) / np.float32(255)
        alpha = mask_from_array(opacity[:, :, 0])
        pixels = pixels[:, :, :3] * opacity + paper * (1 - opacity)
    return UprightImage(tuple(_plane_from(pixels[:, :, channel]) for channel in range(3)), alpha)


def mask_from_array(mask: Pixels) -> Image.Image:
    """Return a mask (H, W) in 0..1 as an image of mode L."""
    return Image.fromarray((np.clip(mask, 0, 1) * 255 + 0.5).astype(np.uint8))


def crop_mask(mask: Image.Image, image_size: Size, box: Box, size: Size) -> NDArray[np.uint8]:
    """Return the part of a mask under the image's crop, averaged to `size` (that of the latents), (H, W)
    uint8.

    The mask may have another size than the image, but must have the same shape; otherwise raises BadImage.
    """
    across, down = mask.width / image_size[0], mask.height / image_size[1]
    if abs(across / down - 1) > 0.02 + 1 / min(mask.size):
        raise BadImage(
            f"the mask is {mask.width} x {mask.height} px and the image {image_size[0]} x {image_size[1]}; "
            "make the mask the image's shape"
        )
    scaled = (
        box[0] * across,
        box[1] * down,
        min(box[2] * across, mask.width),
        min(box[3] * down, mask.height),
    )
    return np.asarray(mask.resize(size, Image.Resampling.BOX, box=scaled))


def _color(image: Image.Image, background: str) -> tuple[tuple[Image.Image, ...], Image.Image | None]:
    if image.mode in _DEEP_GRAY:
        return (_plane_from(_unit_range(image)),), None
    if has_alpha(image):
        full = image.convert("RGBA")
        alpha = full.getchannel("A")
        color = _to_srgb(full.convert("RGB"), image.info.get("icc_profile"))
        paper = Image.new("RGB", image.size, background)
        paper.paste(color, mask=alpha)
        return (paper,), alpha
    if image.mode not in ("RGB", "L", "CMYK"):  # the modes that profiles are for
        image = image.convert("RGB")
    return (_to_srgb(image, image.info.get("icc_profile")),), None


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Return the image in sRGB, mode RGB. A missing or broken profile counts as sRGB, as in every viewer."""
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            converted = ImageCms.profileToProfile(
                image, source, ImageCms.createProfile("sRGB"), outputMode="RGB"
            )
            if converted is not None:
                return converted
        except (ImageCms.PyCMSError, OSError, ValueError, ImportError) as error:
            log.warning("%s: color profile ignored: %s", getattr(image, "filename", "image"), error)
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
