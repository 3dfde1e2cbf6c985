"""Sliders: datasets whose LoRA does one thing at strength 1 and the opposite at -1.

From words, any pictures serve, as only the texts differ; from pairs, each picture has another end. What a
slider needs goes with its dataset, so Encode Dataset caches its texts and pictures as all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from ..user_error import UserError
from .config import DatasetConfig
from .index import Index
from .samples import ImageSet, SampleTable
from .slider_words import SliderWords

SHOWN = 5
"""Names that an error lists."""


def slide_words(images: ImageSet, words: SliderWords) -> ImageSet:
    """Return the images as the dataset of a slider from words. Raises UserError if they are one already."""
    return replace(_plain(images), words=words)


def pair_images(positive: ImageSet, negative: ImageSet) -> ImageSet:
    """Return the dataset of a slider between two sets: every positive image has a negative one of its name.

    Extensions don't count. Raises UserError for an image without its other end, a pair of two shapes, and
    crops or colors at random, which would differ.
    """
    ends = [_by_name(images) for images in (positive, negative)]
    for one, two, what in ((0, 1, "negative"), (1, 0, "positive")):
        alone = [name for name in ends[one] if name not in ends[two]]
        _require_none(alone, f"have no {what} image of the same name")
    _require_alike([source.config for source in (*positive.sources, *negative.sources)])
    table, others, shapes = SampleTable(), [], []
    for sample in positive.samples:
        other = negative.samples[ends[1][_stem(sample.name)]]
        if sample.width * other.height != sample.height * other.width:
            shapes.append(_stem(sample.name))
        table.append(sample)
        others.append(replace(other, source=other.source + len(positive.sources)))
    _require_none(shapes, "have another shape at the other end; crop both alike")
    for other in others:
        table.append(other)
    return ImageSet(
        table,
        (*positive.sources, *negative.sources),
        (*positive.skipped, *negative.skipped),
        (*positive.ignored, *negative.ignored),
        positive.unread + negative.unread,
        pairs=len(positive),
    )


def find_other_ends(index: Index, images: ImageSet) -> NDArray[np.int32]:
    """Return (entries,) the entry of the other end of each positive one, of the same bucket; 0 elsewhere.

    Raises UserError for pairs that have none.
    """
    samples, buckets = index.sample.tolist(), index.bucket.tolist()
    places = {place: entry for entry, place in enumerate(zip(samples, buckets, strict=True))}
    found, lacking = np.zeros(len(samples), np.int32), []
    for (sample, bucket), entry in places.items():
        if sample < images.pairs:
            if (other := places.get((sample + images.pairs, bucket))) is None:
                lacking.append(images.samples.names[sample])
            else:
                found[entry] = other
    _require_none(lacking, "have another size at the other end; give both as many pixels")
    return found


def _plain(images: ImageSet) -> ImageSet:
    if images.words or images.pairs:
        raise UserError("slider: this dataset is that of a slider already; connect the one before it.")
    return images


def _by_name(images: ImageSet) -> dict[str, int]:
    names = {_stem(name): place for place, name in enumerate(_plain(images).samples.names)}
    if len(names) < len(images):
        raise UserError("slider: two images of one end have the same name; give each a name of its own.")
    return names


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


def _require_alike(configs: Sequence[DatasetConfig]) -> None:
    if len({(config.bucket, config.augment, config.dtype) for config in configs}) > 1:
        raise UserError(
            "slider: the two ends differ in resolution, flip or crop; set them alike in Load Dataset and "
            "Dataset Settings of both, as the images of a pair are compared point by point."
        )
    if any(config.augment.crop != "center" or config.augment.jitters for config in configs):
        raise UserError(
            "slider: random crops and colors would differ within a pair; in Dataset Settings set crop to "
            "center, and brightness, contrast, saturation and hue to 0."
        )


def _require_none(names: Sequence[str], why: str) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise UserError(f"slider: {len(names)} image(s) {why}: {', '.join(names[:SHOWN])}{more}.")
