"""Captioned images from a scan, without pixels: the output of Load Dataset.

A million `Sample` objects would take half a gigabyte, so an `ImageSet` has compact columns and makes
each `Sample` on access.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .bad_files import Skipped
from .bucket import Size
from .clip import Video
from .config import DatasetConfig
from .slider_words import SliderWords
from .text_columns import Strings, Texts

IN_MEMORY = "image-"
"""Prefix of the names of images from a graph."""
VIDEO = "video-"
"""Prefix of the names of videos from a graph."""


class Reference(NamedTuple):
    """An image that the model is given beside the caption: what is to be edited."""

    name: str
    """Path inside its folder; of an image from the graph: its place in `Source.reference_pixels`."""
    width: int
    height: int
    has_alpha: bool = False
    bytes: int = 0
    mtime_ns: int = 0


@dataclass(frozen=True)
class Sample:
    """A captioned image."""

    name: str
    """Path inside its folder, with forward slashes on every system."""
    width: int
    """Pixels, after EXIF rotation; of a sound, milliseconds."""
    height: int
    """0 for a sound."""
    captions: tuple[str, ...]
    """As written, before trigger, shuffling and the rest; several are alternatives. Without one: ("",)."""
    repeats: int = 1
    mask: str = ""
    """Path of the mask file inside the folder; empty if there is none."""
    has_alpha: bool = False
    encoded: tuple[Size, ...] = ()
    """For a latent file: the image sizes in pixels that it has latents for; () for an image."""
    bytes: int = 0
    mtime_ns: int = 0
    source: int = 0
    """Index into `ImageSet.sources`."""
    frames: int = 0
    """Frames of a clip, before the VAE's own step is known; 0 for an image."""
    start: int = 0
    """The first of them in the clip; of a sound, the millisecond at which its piece begins."""
    references: tuple[Reference, ...] = ()
    """Reference i is in folder i of `Source.references`."""

    @property
    def is_sound(self) -> bool:
        return not self.height


@dataclass(frozen=True)
class Source:
    """Where samples come from: a folder, or images that are already in memory."""

    config: DatasetConfig
    root: Path | None = None
    pixels: tuple[Tensor, ...] = field(default=(), repr=False)
    """In-memory images (H, W, 3 or 4) float32 in 0..1; image i is the sample named IN_MEMORY + i."""
    masks: tuple[Tensor, ...] = field(default=(), repr=False)
    """In-memory masks (H, W) float32 in 0..1: one per image, or none."""
    references: tuple[Path, ...] = ()
    """Folders of the references."""
    reference_pixels: tuple[Tensor, ...] = field(default=(), repr=False)
    """In-memory references, as `pixels`."""
    is_encoded: bool = False
    """Whether its samples are latents from the graph, which have no pixels."""
    is_captioned: bool = True
    """Whether the captions of such samples are known."""
    videos: tuple[Video, ...] = field(default=(), repr=False)
    """Videos from a graph; video i gives the samples named VIDEO + i."""

    @property
    def title(self) -> str:
        if self.root is not None:
            return self.root.name
        return "latents" if self.is_encoded else "videos" if self.videos else "images"

    def path(self, name: str) -> Path:
        assert self.root is not None, "in-memory images have no path"
        return self.root / name


class SampleTable(Sequence[Sample]):
    """A list of samples in compact columns; once built, it does not change."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self.names = Strings()
        self._masks = Strings()
        self._encoded = Strings()  # "1024x768 512x384"
        self._references = Strings()  # JSON
        self._captions = Texts()
        self._small = array("i")  # _SMALL of every sample
        self._large = array("q")  # bytes, mtime_ns, number of captions up to and with this sample
        for sample in samples:
            self.append(sample)

    def append(self, sample: Sample) -> None:
        """Add a sample, while the table is built."""
        self.names.append(sample.name)
        self._masks.append(sample.mask)
        self._encoded.append(" ".join(f"{width}x{height}" for width, height in sample.encoded))
        self._references.append(json.dumps(sample.references) if sample.references else "")
        for caption in sample.captions:
            self._captions.append(caption)
        self._small.extend(int(getattr(sample, name)) for name in _SMALL)
        self._large.extend((sample.bytes, sample.mtime_ns, len(self._captions)))

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        small = self._small[index * len(_SMALL) : (index + 1) * len(_SMALL)]
        width, height, repeats, source, alpha, frames, clip_start = small
        first = self._large[index * 3 - 1] if index else 0
        size, mtime_ns, last = self._large[index * 3 : index * 3 + 3]
        return Sample(
            name=self.names[index],
            width=width,
            height=height,
            captions=tuple(self._captions[first:last]),
            repeats=repeats,
            mask=self._masks[index],
            has_alpha=bool(alpha),
            encoded=tuple(_size(text) for text in self._encoded[index].split()),
            bytes=size,
            mtime_ns=mtime_ns,
            source=source,
            frames=frames,
            start=clip_start,
            references=tuple(Reference(*each) for each in json.loads(self._references[index] or "[]")),
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def column(self, name: str) -> NDArray[np.int32]:
        """Return one of _SMALL for all samples as (samples,), without copying."""
        return np.frombuffer(self._small, np.int32).reshape(-1, len(_SMALL))[:, _SMALL.index(name)]

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        strings = (self.names, self._masks, self._encoded, self._references)
        texts = self._captions.nbytes + sum(part.nbytes for part in strings)
        return texts + 4 * len(self._small) + 8 * len(self._large)


_SMALL = ("width", "height", "repeats", "source", "has_alpha", "frames", "start")
"""Fields of a sample that fit into 32 bits."""


def _size(text: str) -> Size:
    width, height = text.split("x")
    return int(width), int(height)


@dataclass(frozen=True)
class ImageSet:
    """Samples from one or more folders, with their settings."""

    samples: SampleTable
    sources: tuple[Source, ...]
    skipped: tuple[Skipped, ...] = ()
    """Unusable files, left out with the user's permission."""
    ignored: tuple[tuple[str, int], ...] = ()
    """Extensions of other files, with their number of files."""
    unread: int = 0
    """Number of subfolders not read because `recursive` is off."""
    left_out: tuple[str, ...] = ()
    """Names of the images that `leave_out` leaves out."""
    words: SliderWords | None = None
    """For a slider from words: its texts."""
    pairs: int = 0
    """For a slider from pairs: their number; sample i and sample i + pairs are two ends."""

    def __len__(self) -> int:
        return len(self.samples)

    def source(self, sample: Sample) -> Source:
        return self.sources[sample.source]
