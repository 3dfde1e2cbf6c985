"""Buckets and crops: the size that an image is resized to, and the part of it that is used.

The one rule: an image goes to the bucket with the nearest aspect ratio. Ratios are compared as logarithms, so
that 2:1 is as far from 1:1 as 1:2. No pixels are read here. Aspect-ratio buckets are NovelAI's ("NovelAI
Improvements on Stable Diffusion", 2022).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..rng import generator
from ..user_error import UserError
from .config import AugmentConfig, BucketConfig

Size = tuple[int, int]
"""(width, height) in pixels."""
Bucket = tuple[int, ...]
"""(width, height) of images, (width, height, frames) of clips, (milliseconds,) of sounds."""
Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels of the upright source image."""


@dataclass(frozen=True)
class Crop:
    """A crop of an image: `box` of the source, resized to `bucket`."""

    bucket: Size
    box: Box

    @property
    def scale(self) -> float:
        """Bucket pixels per source pixel; above 1 the image was enlarged."""
        return self.bucket[0] / (self.box[2] - self.box[0])

    def cut_off(self, width: int, height: int) -> float:
        """Return the share of the image's area that lies outside the crop, 0 to 1."""
        left, top, right, bottom = self.box
        return max(0.0, 1 - (right - left) * (bottom - top) / (width * height))


@lru_cache(maxsize=64)
def bucket_sizes(resolution: int, *, step: int, min_side: int = 0, max_side: int = 0) -> tuple[Size, ...]:
    """Return all sizes of at most resolution x resolution pixels that cannot grow, narrowest first.

    Sides are multiples of `step` between `min_side` (0: half the resolution) and `max_side` (0: twice it).
    Raises UserError if no size fits.
    """
    area = resolution * resolution
    shortest = math.ceil(max(min_side or resolution // 2, 1) / step) * step
    longest = (max_side or 2 * resolution) // step * step
    sizes: set[Size] = set()
    for side in range(shortest, longest + 1, step):
        other = min(area // side // step * step, longest)
        if other >= shortest:
            sizes |= {(side, other), (other, side)}
    if not sizes:
        raise UserError(
            f"resolution {resolution} leaves no bucket: sides must be multiples of {step} from "
            f"{shortest} to {longest} with at most {area} pixels. Raise the resolution, or set the shortest "
            "and longest side to 0."
        )
    return tuple(sorted(sizes, key=lambda size: size[0] / size[1]))


def nearest(sizes: tuple[Size, ...], width: int, height: int) -> Size:
    """Return the size with the nearest aspect ratio; the narrower of two equally near ones.

    `sizes` are sorted by aspect ratio, as `bucket_sizes` returns them.
    """
    ratios = _log_ratios(sizes)
    wanted = math.log(width / height)
    place = min(max(bisect_left(ratios, wanted), 1), len(sizes) - 1) if len(sizes) > 1 else 0
    before = max(place - 1, 0)
    return sizes[before] if wanted - ratios[before] <= ratios[place] - wanted else sizes[place]


@lru_cache(maxsize=64)
def _log_ratios(sizes: tuple[Size, ...]) -> list[float]:
    return [math.log(width / height) for width, height in sizes]


def bucket_for(width: int, height: int, resolution: int, config: BucketConfig, *, step: int) -> Size:
    """Return the size that an image is resized to at one resolution.

    Raises UserError if enlarging is not allowed and the image is smaller than one step.
    """
    if config.square:
        side = max(resolution // step * step, step)
        bucket = (side, side)
    else:
        sizes = bucket_sizes(resolution, step=step, min_side=config.min_side, max_side=config.max_side)
        bucket = nearest(sizes, width, height)
    if config.upscale or (bucket[0] <= width and bucket[1] <= height):
        return bucket
    return _own_size(width, height, resolution, config, step=step)


def buckets_for(width: int, height: int, config: BucketConfig, *, step: int) -> list[Size]:
    """Return an image's sizes for training: one per resolution, or only the largest without enlarging."""
    step = math.lcm(step, config.step or step)
    resolutions = sorted(config.resolutions)
    if not config.each:
        large_enough = [r for r in resolutions if r * r <= width * height]
        resolutions = [large_enough[-1] if large_enough else resolutions[0]]
    sizes = [bucket_for(width, height, resolution, config, step=step) for resolution in resolutions]
    return list(dict.fromkeys(sizes))  # without enlarging, several resolutions can end at the same size


def crop_box(width: int, height: int, bucket: Size, *, at: tuple[float, float] = (0.5, 0.5)) -> Box:
    """Return the largest box of the bucket's shape inside the image.

    `at` is its position: (0, 0) is top left, (0.5, 0.5) the center, (1, 1) bottom right.
    """
    scale = max(bucket[0] / width, bucket[1] / height)
    box_width, box_height = min(bucket[0] / scale, width), min(bucket[1] / scale, height)
    left, top = at[0] * (width - box_width), at[1] * (height - box_height)
    return (left, top, min(left + box_width, width), min(top + box_height, height))


def crops_for(width: int, height: int, bucket: Size, config: AugmentConfig, *, content: str) -> list[Crop]:
    """Return the cached crops of an image: one, or `variations` if crops or colors are random.

    Random positions are keyed by `content`, so an image is cropped the same in every run.
    """
    count = config.variations if config.crop != "center" or config.jitters else 1
    if config.crop == "corners":
        places = [((i & 1) * 1.0, (i >> 1 & 1) * 1.0) for i in range(count)]
    elif config.crop == "random":
        places = [_random_place(content, bucket, i) for i in range(count)]
    else:
        places = [(0.5, 0.5)] * count
    return [Crop(bucket, crop_box(width, height, bucket, at=place)) for place in places]


def _random_place(content: str, bucket: Size, variation: int) -> tuple[float, float]:
    x, y = torch.rand(2, generator=generator(0, "crop", content, *bucket, variation)).tolist()
    return x, y


def _own_size(width: int, height: int, resolution: int, config: BucketConfig, *, step: int) -> Size:
    """Return about the image's own size, within the area and the longest side, rounded down to steps."""
    if config.square:
        sides = [min(width, height) // step * step] * 2
    else:
        shrink = min(1.0, resolution / math.sqrt(width * height))
        longest = (config.max_side or 2 * resolution) // step * step
        sides = [min(int(side * shrink + 1e-6) // step * step, longest) for side in (width, height)]
    if min(sides) < step:
        raise UserError(
            f"{width} x {height} px is smaller than one bucket step ({step} px); allow enlarging."
        )
    return sides[0], sides[1]
