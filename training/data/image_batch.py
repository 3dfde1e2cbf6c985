"""Images and videos in memory (IMAGE and VIDEO of a graph) as a dataset, handled like those from a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..model import OnProgress, no_progress
from ..user_error import UserError
from .bad_files import Skipped, bad_files_error
from .caption import require_usable
from .caption_file import NO_CAPTION
from .clip import Video, read_video, samples_of
from .config import DatasetConfig, require_pairs_stay
from .image_file import MIN_SIDE, BadImage
from .samples import IN_MEMORY, VIDEO, ImageSet, Reference, Sample, SampleTable, Source


def from_images(
    images: Tensor | Sequence[Tensor],
    captions: Sequence[str],
    masks: Tensor | Sequence[Tensor] | None = None,
    config: DatasetConfig | None = None,
    references: Sequence[Sequence[Tensor]] = (),
) -> ImageSet:
    """Make a dataset of images (B, H, W, 3 or 4) in 0..1, or of several such batches of different sizes.

    `captions` has one for each image, or one for all. `masks` (B, H, W) are 1 where the image counts; they
    are ignored if the settings use no masks, or transparency. `references` are up to three lists of images,
    each with one for each image, or one for all. Raises UserError if the numbers do not match,
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
    given = [_split_batches(each, 4) for each in references]
    for number, each in enumerate(given, 1):
        if len(each) not in (1, len(pixels)):
            raise UserError(
                f"reference{number}: {len(each)} for {len(pixels)} images; give one for each, or one for all."
            )
    if given:
        require_pairs_stay(config.augment)
    table, flat = SampleTable(), [image for each in given for image in each]
    starts = [sum(map(len, given[:place])) for place in range(len(given))]
    for index, (image, text) in enumerate(zip(pixels, texts, strict=True)):
        own = [start + (index if len(each) > 1 else 0) for start, each in zip(starts, given, strict=True)]
        partners = tuple(_reference(place, flat[place]) for place in own)
        table.append(replace(_sample(index, image, text.strip(), config), references=partners))
    source = Source(config, None, tuple(pixels), tuple(weights), reference_pixels=tuple(flat))
    return ImageSet(table, (source,))


def _reference(place: int, image: Tensor) -> Reference:
    height, width, channels = _require_image(f"reference {place}", image)
    return Reference(str(place), width, height, channels == 4)


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
    height, width, channels = _require_image(name, image)
    _require_caption(name, text, config)
    return Sample(name, width, height, (text,), repeats=config.repeats, has_alpha=channels == 4)


def _require_caption(name: str, text: str, config: DatasetConfig) -> None:
    if not text and config.caption.missing == "error":
        raise UserError(f"{name}: no caption; write one, or set {NO_CAPTION}.")
    try:
        require_usable((text,), config)
    except BadImage as error:
        raise UserError(f"{name}: {error}.") from error


def _require_image(name: str, image: Tensor) -> tuple[int, int, int]:
    """Return height, width and channels of an image. Raises UserError if it cannot be trained."""
    height, width, channels = image.shape
    if channels not in (3, 4) or min(height, width) < MIN_SIDE:
        raise UserError(
            f"{name}: shape {tuple(image.shape)}; images are (height, width, 3), {MIN_SIDE} px or more."
        )
    if not torch.isfinite(image).all():
        raise UserError(f"{name}: has NaN or infinite values; check the node that made it.")
    return height, width, channels
