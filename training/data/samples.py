"""Captioned images from a scan, without pixels: the output of Load Dataset.

A million `Sample` objects would take half a gigabyte, so an `ImageSet` has compact columns and makes
each `Sample` on access.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..user_error import UserError
from .bucket import Size
from .clip import Video
from .config import DatasetConfig
from .slider_words import SliderWords

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
class Skipped:
    """A file that was left out, and why."""

    name: str
    reason: str


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


class Strings(Sequence[str]):
    """A list of strings in one block of UTF-8, with about 8 bytes per string on top of its text."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._text = bytearray()
        self._ends = array("q")
        for string in strings:
            self.append(string)

    def append(self, string: str) -> None:
        # File names may have bytes that are not valid UTF-8; Python represents them as lone surrogates.
        self._text += string.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return self._text[start : self._ends[index]].decode("utf-8", "surrogatepass")

    @property
    def nbytes(self) -> int:
        return len(self._text) + self._ends.itemsize * len(self._ends)


class Texts(Sequence[str]):
    """A list of longer strings, compressed in blocks: fast to iterate, slower (0.1 ms) to index."""

    _BLOCK = 256

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._last: list[str] = []
        self._decompressed: tuple[int, list[str]] = (-1, [])

    def append(self, text: str) -> None:
        self._last.append(text)
        if len(self._last) == self._BLOCK:
            self._blocks.append(zlib.compress(json.dumps(self._last).encode(), 1))
            self._last = []

    def __len__(self) -> int:
        return len(self._blocks) * self._BLOCK + len(self._last)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        block, place = divmod(range(len(self))[index], self._BLOCK)
        if block == len(self._blocks):
            return self._last[place]
        cached, texts = self._decompressed
        if cached != block:
            texts = json.loads(zlib.decompress(self._blocks[block]))
            self._decompressed = (block, texts)  # one assignment: threads may read at the same time
        return texts[place]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._blocks)) + sum(map(len, self._last))


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


def join(sets: Sequence[ImageSet], *, shares: Sequence[float] = ()) -> ImageSet:
    """Return several sets as one; each keeps its own settings, repeats and loss weight.

    `shares` are the sets' parts of an epoch, whatever their numbers of images: (1, 1) is half and half.
    Repeats are multiplied by whole numbers up to about sixteen, to within 5 % if possible. Raises UserError
    if there is no set, or not one positive share for each.
    """
    if not sets:
        raise UserError("no datasets to join; connect at least one.")
    if any(images.words or images.pairs for images in sets):
        raise UserError("the dataset of a slider cannot be joined; connect Join Datasets before it.")
    visits = [int(images.samples.column("repeats").sum()) for images in sets]
    times = _multipliers(visits, shares) if shares else [1] * len(sets)
    sources: list[Source] = []
    table = SampleTable()
    ignored: Counter[str] = Counter()
    for images, factor in zip(sets, times, strict=True):
        for sample in images.samples:
            table.append(
                replace(sample, source=sample.source + len(sources), repeats=sample.repeats * factor)
            )
        sources.extend(images.sources)
        ignored.update(dict(images.ignored))
    skipped = tuple(bad for images in sets for bad in images.skipped)
    unread = sum(images.unread for images in sets)
    left_out = tuple(name for images in sets for name in images.left_out)
    return ImageSet(table, tuple(sources), skipped, tuple(sorted(ignored.items())), unread, left_out=left_out)


def _multipliers(visits: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Return a whole factor for each set, so that visits x factor is about proportional to the shares."""
    if len(shares) != len(visits) or not all(0 < share < math.inf for share in shares):
        raise UserError(f"{len(visits)} datasets need {len(visits)} positive shares, got {list(shares)}.")
    wanted = [share / count for share, count in zip(shares, visits, strict=True)]
    tried = []
    for base in range(1, 17):
        times = [max(1, round(base * ratio / min(wanted))) for ratio in wanted]
        rates = [count / ratio for count, ratio in zip(times, wanted, strict=True)]
        tried.append((max(rates) / min(rates), times))
    return next((times for error, times in tried if error <= 1.05), min(tried)[1])


def bad_files_error(bad: Sequence[Skipped], what: str, others: int) -> UserError:
    """Return the error that names every unusable file with its reason, beside so many `others`."""
    shown = grouped(bad)
    if len(shown) > 100:
        shown[100:] = [f"  ... and {len(shown) - 100} more"]
    advice = (
        "Repair or remove them, leave them out by 'Show and add images', or train a folder without them by "
        "'skip bad images' in Load Dataset."
    )
    advice = advice if others else "There are no other images; repair or replace these."
    lines = [f"{what}: {len(bad)} file(s) cannot be used.", *shown]
    if any(not item.reason.startswith(NO_CAPTION) for item in bad):  # whose reason says what to do
        lines.append(advice)
    return UserError("\n".join(lines))


NO_CAPTION = "no caption"
"""How the reason of an image without a caption begins."""
NAMED = 20
"""Most files that are named where several have the same reason."""


def grouped(bad: Sequence[Skipped]) -> list[str]:
    """Return a line for each file, or for several with the same reason, but for their own names in it."""
    groups: dict[str, list[Skipped]] = defaultdict(list)
    for item in bad:
        own = rf"(?<!\S){re.escape(PurePosixPath(item.name).stem)}\.(?=\w)"
        groups[re.sub(own, "<name>.", item.reason)].append(item)
    lines = []
    for reason, items in groups.items():
        if len(items) == 1:
            lines.append(f"  {items[0].name}: {items[0].reason}")
        else:
            names = ", ".join(item.name for item in items[:NAMED])
            more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
            lines.append(f"  {len(items)} files: {reason}: {names}{more}")
    return lines
