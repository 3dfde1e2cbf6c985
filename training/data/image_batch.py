"""Images in memory (an IMAGE of a graph) as a dataset, handled like images from a folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..user_error import UserError
from .caption import require_usable
from .caption_file import NO_CAPTION
from .config import DatasetConfig
from .image_file import MIN_SIDE, BadImage
from .samples import IN_MEMORY, ImageSet, Sample, SampleTable, Source


def from_images(
    images: Tensor | Sequence[Tensor],
    captions: Sequence[str],
    masks: Tensor | Sequence[Tensor] | None = None,
    config: DatasetConfig | None = None,
) -> ImageSet:
    """Make a dataset of images (B, H, W, 3 or 4) in 0..1, or of several such batches of different sizes.

    `captions` has one for each image, or one for all. `masks` (B, H, W) are 1 where the image counts; they
    are ignored if the settings use no masks, or transparency. Raises UserError if the numbers do not match,
    an image is empty or too small, or a caption is missing.
    """
    config = config or DatasetConfig()
    pixels = _split_batches([images] if isinstance(images, Tensor) else images, 4)
    masks = masks if config.mask.source in ("file", "auto") else None
    weights = _split_batches([masks] if isinstance(masks, Tensor) else masks or [], 3)
    texts = list(captions) * len(pixels) if len(captions) == 1 else list(captions)
    if not pixels:
        raise UserError("no images given; connect at least one.")
    if len(texts) != len(pixels):
        raise UserError(f"{len(pixels)} images but {len(texts)} captions; give one for each, or one for all.")
    if weights and len(weights) not in (1, len(pixels)):
        raise UserError(f"{len(pixels)} images but {len(weights)} masks; give one for each, or one for all.")
    if len(weights) == 1:
        weights = weights * len(pixels)
    table = SampleTable()
    for index, (image, text) in enumerate(zip(pixels, texts, strict=True)):
        table.append(_sample(index, image, text.strip(), config))
    return ImageSet(table, (Source(config, None, tuple(pixels), tuple(weights)),))


def _split_batches(batches: Sequence[Tensor], dims: int) -> list[Tensor]:
    """Return the single images of the batches; a tensor with one dimension less is one image."""
    single: list[Tensor] = []
    for batch in batches:
        batch = batch[None] if batch.ndim == dims - 1 else batch
        if batch.ndim != dims or not batch.numel():
            raise UserError(f"expected a batch of {dims} dimensions, got shape {tuple(batch.shape)}.")
        single += batch.detach().to("cpu", torch.float32).unbind(0)
    return single


def _sample(index: int, image: Tensor, text: str, config: DatasetConfig) -> Sample:
    name = f"{IN_MEMORY}{index}"
    height, width, channels = image.shape
    if channels not in (3, 4) or min(height, width) < MIN_SIDE:
        raise UserError(
            f"{name}: shape {tuple(image.shape)}; images are (height, width, 3), {MIN_SIDE} px or more."
        )
    if not torch.isfinite(image).all():
        raise UserError(f"{name}: has NaN or infinite values; check the node that made it.")
    if not text and config.caption.missing == "error":
        raise UserError(f"{name}: no caption; write one, or set {NO_CAPTION}.")
    try:
        require_usable((text,), config)
    except BadImage as error:
        raise UserError(f"{name}: {error}.") from error
    return Sample(name, width, height, (text,), repeats=config.repeats, has_alpha=channels == 4)
