"""Images and videos in memory (IMAGE and VIDEO of a graph) as a dataset, handled like those from a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..model import OnProgress, no_progress
from ..user_error import UserError
from .caption import require_usable
from .caption_file import NO_CAPTION
from .clip import Video, read_video, samples_of
from .config import DatasetConfig
from .image_file import MIN_SIDE, BadImage
from .samples import IN_MEMORY, VIDEO, ImageSet, Sample, SampleTable, Skipped, Source, bad_files_error


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
    texts = _texts(captions, len(pixels), "images")
    if weights and len(weights) not in (1, len(pixels)):
        raise UserError(f"{len(pixels)} images but {len(weights)} masks; give one for each, or one for all.")
    if len(weights) == 1:
        weights = weights * len(pixels)
    table = SampleTable()
    for index, (image, text) in enumerate(zip(pixels, texts, strict=True)):
        table.append(_sample(index, image, text.strip(), config))
    return ImageSet(table, (Source(config, None, tuple(pixels), tuple(weights)),))


def from_videos(
    videos: Sequence[Video],
    captions: Sequence[str],
    config: DatasetConfig,
    *,
    on_progress: OnProgress = no_progress,
) -> ImageSet:
    """Make a dataset of videos, of which `config.frames` are trained, read once now and once for encoding.

    `captions` are as in `from_images`. Raises UserError that names every unusable video.
    """
    if not config.frames:
        raise UserError("frames: 0 trains images alone; set how many frames of each video are trained.")
    texts = _texts(captions, len(videos), "videos")
    table, bad = SampleTable(), []
    for index, (video, text) in enumerate(zip(videos, texts, strict=True)):
        on_progress(index, len(videos), "Reading the videos")
        name = f"{VIDEO}{index}"
        try:
            header, _ = read_video(video)
            _require_caption(name, text.strip(), config)
            for start in samples_of(header, config):
                sample = Sample(name, *header.size, (text.strip(),), repeats=config.repeats)
                table.append(replace(sample, frames=config.frames, start=start))
        except BadImage as error:
            bad.append(Skipped(name, str(error)))
    if bad and (not config.skip_bad or not len(table)):
        raise bad_files_error(bad, "videos", len(table))
    return ImageSet(table, (Source(config, None, videos=tuple(videos)),), tuple(bad))


def _texts(captions: Sequence[str], count: int, what: str) -> list[str]:
    """Return one caption for each of `count` images or videos."""
    if not count:
        raise UserError(f"no {what} given; connect at least one.")
    texts = list(captions) * count if len(captions) == 1 else list(captions)
    if len(texts) != count:
        raise UserError(f"{count} {what} but {len(texts)} captions; give one for each, or one for all.")
    return texts


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
    _require_caption(name, text, config)
    return Sample(name, width, height, (text,), repeats=config.repeats, has_alpha=channels == 4)


def _require_caption(name: str, text: str, config: DatasetConfig) -> None:
    if not text and config.caption.missing == "error":
        raise UserError(f"{name}: no caption; write one, or set {NO_CAPTION}.")
    try:
        require_usable((text,), config)
    except BadImage as error:
        raise UserError(f"{name}: {error}.") from error
