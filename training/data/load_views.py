"""The views of a sample on their way to the VAE: pixels, frames, sound or latents, each with its mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from .augment import View, render, views_for
from .bucket import Crop, Size
from .encoding import Encoding
from .image import crop_mask
from .image_file import BadImage
from .index import Index
from .open_sample import mask_file, open_clip, open_latents, open_sample, open_sound
from .samples import Sample, Source

SOUND = View(Crop((0, 0), (0.0, 0.0, 0.0, 0.0)))
"""What stands for the view of a sound, which has none."""


@dataclass(frozen=True)
class Loaded:
    """A view on its way to the VAE. `pixels`, `latents` or `mask` is None if it is in the cache."""

    view: View
    latent_key: bytes
    mask_key: bytes
    pixels: Tensor | None = None
    latents: Tensor | None = None
    """From a latent file, in place of pixels."""
    sound: tuple[Tensor, int] | None = None
    """(2, samples) and their rate, in place of pixels."""
    mask: Tensor | None = None
    hole: Tensor | None = None
    """The mask in the size of `pixels`, for a model that is given it."""


def load_views(work: Encoding, index: Index, position: int) -> list[Loaded] | str:
    """Return the missing views of a sample, or why it is unusable. Runs in a thread beside the VAE."""
    sample = work.images.samples[position]
    source = work.images.source(sample)
    content = int(index.content[position]).to_bytes(8, "little").hex()
    views = [view for bucket in views_of(work, source, sample, content) for view in bucket]
    views = [SOUND] if sample.is_sound else views
    first = int(index.view_start[np.searchsorted(index.sample, position)])
    wanted = [
        Loaded(view, index.latent_key(place), index.mask_key(place))
        for place, view in enumerate(views, first)
    ]
    try:
        if sample.is_sound:
            return [replace(wanted[0], sound=open_sound(source, sample))]
        load = _with_latents if sample.encoded else _with_frames if sample.frames else _with_pixels
        return load(work, source, sample, wanted)
    except BadImage as error:
        return str(error)


def _with_pixels(work: Encoding, source: Source, sample: Sample, wanted: Sequence[Loaded]) -> list[Loaded]:
    image, mask = open_sample(source, sample)
    loaded = []
    for item in wanted:
        lacks = work.lacks("latents", item.latent_key)
        pixels = torch.from_numpy(render(image, item.view)) if lacks else None
        weights = _weights(work, source, mask, image.size, item.view, item.mask_key)
        hole = None
        if mask is not None and pixels is not None and work.encoder.inpaints:
            hole = _mask_at(mask, image.size, item.view, 1).float() / 255
        loaded.append(replace(item, pixels=pixels, mask=weights, hole=hole))
    return loaded


def _with_frames(work: Encoding, source: Source, sample: Sample, wanted: Sequence[Loaded]) -> list[Loaded]:
    """Return the views of a clip, (frames, H, W, 3), in 8 bits where the clip has no more."""
    size = (sample.width, sample.height)
    mask = mask_file(source, sample) if source.root is not None else None
    missing = [item for item in wanted if work.lacks("latents", item.latent_key)]
    rendered: dict[bytes, list[Tensor]] = {item.latent_key: [] for item in missing}
    # One decoded frame at a time: a clip in full size may be larger than memory.
    for image in open_clip(source, sample, work.frames(sample)) if missing else ():
        for key, view in {item.latent_key: item.view for item in missing}.items():
            pixels = torch.from_numpy(render(image, view))
            exact = image.planes[0].mode == "RGB" and view.jitter is None
            rendered[key].append((pixels * 255).round().to(torch.uint8) if exact else pixels)
    stacked = {key: torch.stack(frames) for key, frames in rendered.items()}
    return [
        replace(
            item,
            pixels=stacked.get(item.latent_key),
            mask=_weights(work, source, mask, size, item.view, item.mask_key),
        )
        for item in wanted
    ]


def _with_latents(work: Encoding, source: Source, sample: Sample, wanted: Sequence[Loaded]) -> list[Loaded]:
    whole, loaded = mask_file(source, sample), []
    for item in wanted:
        bucket = item.view.crop.bucket
        latents, alpha = open_latents(source, sample, bucket, work.encoder.latent_shape(*bucket))
        mask, size, view = whole, (sample.width, sample.height), item.view
        if mask is None:
            mask, size, view = alpha, bucket, View(Crop(bucket, (0, 0, *bucket)))
        weights = _weights(work, source, mask, size, view, item.mask_key)
        lacks = work.lacks("latents", item.latent_key)
        loaded.append(replace(item, latents=latents if lacks else None, mask=weights))
    return loaded


def _weights(
    work: Encoding, source: Source, mask: Image | None, image_size: Size, view: View, key: bytes
) -> Tensor | None:
    """Return the mask under a view; None if the image has none or it is in the cache.

    Raises BadImage if it leaves nothing of the view.
    """
    if mask is None or not work.lacks("masks", key):
        return None
    weights = _mask_at(mask, image_size, view, work.reduction)
    if not weights.any() and not source.config.mask.outside:
        raise BadImage("its mask is black over the whole crop, so nothing would be learned from it")
    return weights


def _mask_at(mask: Image, image_size: Size, view: View, reduction: int) -> Tensor:
    """Return the mask under a view at latent resolution, (H, W) uint8."""
    width, height = view.crop.bucket
    values = crop_mask(mask, image_size, view.crop.box, (width // reduction, height // reduction))
    return torch.from_numpy(values[:, ::-1].copy() if view.flip else values.copy())


def views_of(work: Encoding, source: Source, sample: Sample, content: str) -> list[list[View]]:
    """Return the views of an image or clip at each of its resolutions; none of a sound."""
    if sample.is_sound:
        return []
    size = (sample.width, sample.height)
    return views_for(*size, content, source.config, step=work.step, encoded=sample.encoded)
