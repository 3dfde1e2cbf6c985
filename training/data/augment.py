"""The views of one image: crops, mirror images, changed colors. Each view has its own place in the cache.

The one rule: random draws depend only on the image's content and the settings, so cached views stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..config import to_text
from ..rng import generator
from ..user_error import UserError
from .bucket import Crop, Size, buckets_for, crop_box, crops_for
from .config import AugmentConfig, DatasetConfig
from .image import Pixels, UprightImage

# Rec. 601 luma, and the YIQ color plane in which a hue is an angle (FCC 1953; also W3C SVG 1.1, hueRotate).
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])


@dataclass(frozen=True, repr=False)
class Jitter:
    """Factors for brightness, contrast and saturation, and a rotation of the hue (1 is a full turn)."""

    brightness: float
    contrast: float
    saturation: float
    hue: float
    __repr__ = to_text  # part of a latent's key


@dataclass(frozen=True)
class View:
    """A crop of an image, possibly mirrored, possibly with changed colors."""

    crop: Crop
    flip: bool = False
    jitter: Jitter | None = None

    def offset(self, width: int, height: int) -> tuple[int, int]:
        """Return the crop's (left, top) in pixels of the resized image, which SDXL is conditioned on."""
        left, top, right, _ = self.crop.box
        return round((width - right if self.flip else left) * self.crop.scale), round(top * self.crop.scale)


def views_for(
    width: int,
    height: int,
    content: str,
    config: DatasetConfig,
    *,
    step: int,
    encoded: Sequence[Size] = (),
) -> list[list[View]]:
    """Return the views of an image at each of its resolutions: one list a bucket.

    For a latent file, each of its `encoded` sizes is a bucket with a single view. Raises UserError if no
    bucket fits the image, or the latents do not fit the model.
    """
    if encoded:
        return [[View(_encoded_crop(width, height, bucket, step))] for bucket in encoded]
    return [
        [
            View(crop, flip, _jitter(content, index, config.augment))
            for index, crop in enumerate(crops_for(width, height, bucket, config.augment, content=content))
            for flip in ((False, True) if config.augment.flip else (False,))
        ]
        for bucket in buckets_for(width, height, config.bucket, step=step)
    ]


def _encoded_crop(width: int, height: int, bucket: Size, step: int) -> Crop:
    if bucket[0] % step or bucket[1] % step:
        raise UserError(
            f"its latents are for {bucket[0]} x {bucket[1]} px, but this model needs multiples of {step} "
            f"on both sides; put the image itself beside it, so that it is encoded again."
        )
    return Crop(bucket, crop_box(width, height, bucket))


def render(image: UprightImage, view: View) -> Pixels:
    """Return a view as (H, W, 3) float32 in 0..1."""
    pixels = image.crop(view.crop.box, view.crop.bucket)
    if view.jitter is not None:
        pixels = recolor(pixels, view.jitter)
    return np.ascontiguousarray(pixels[:, ::-1] if view.flip else pixels)


def recolor(pixels: Pixels, jitter: Jitter) -> Pixels:
    """Return pixels (H, W, 3) in 0..1 with brightness, contrast, saturation and hue changed in turn."""
    pixels = pixels * np.float32(jitter.brightness)
    mean = float((pixels @ _LUMA).mean())
    pixels = mean + (pixels - mean) * np.float32(jitter.contrast)
    gray = (pixels @ _LUMA)[:, :, None]
    pixels = gray + (pixels - gray) * np.float32(jitter.saturation)
    if jitter.hue:
        angle = 2 * np.pi * jitter.hue
        turn = np.array([[1, 0, 0], [0, np.cos(angle), -np.sin(angle)], [0, np.sin(angle), np.cos(angle)]])
        pixels = pixels @ (np.linalg.inv(_TO_YIQ) @ turn @ _TO_YIQ).T.astype(np.float32)
    return np.clip(pixels, 0, 1).astype(np.float32)


def _jitter(content: str, variation: int, config: AugmentConfig) -> Jitter | None:
    if not config.jitters:
        return None
    draws = torch.rand(4, generator=generator(0, "jitter", content, variation)).tolist()
    amounts = (config.brightness, config.contrast, config.saturation, config.hue)
    b, c, s, h = ((2 * u - 1) * amount for u, amount in zip(draws, amounts, strict=True))
    return Jitter(1 + b, 1 + c, 1 + s, h)
