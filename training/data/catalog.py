"""What an editor shows of a dataset: each image with its size, crop and caption, or why it cannot be used.

No pixel is read. Files are only digested where two have the same size in bytes, to find duplicates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..model import OnProgress, no_progress
from ..user_error import UserError
from .augment import views_for
from .caption import finish
from .config import DatasetConfig
from .folder import find_images
from .samples import ImageSet, Sample, Source
from .tree import is_named

STEP = 64
"""Bucket step of the crops that are shown: SDXL's. Most models have 16, and cut off a little less."""
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Entry:
    """An image of a dataset, or a file that is none."""

    name: str
    """Path inside the dataset."""
    stamp: str = ""
    """Differs when the file does."""
    width: int = 0
    """Pixels, upright; 0 if the file cannot be used."""
    height: int = 0
    bucket: tuple[int, int] = (0, 0)
    """Size that is trained; the largest of several resolutions."""
    crop: Box = (0.0, 0.0, 1.0, 1.0)
    """Left, top, right and bottom of what is trained, in parts of the image."""
    caption: str = ""
    """As written."""
    others: int = 0
    """Number of alternative captions."""
    trained: str = ""
    """The caption as trained."""
    problem: str = ""
    """Why training would stop at this image, or skip it."""
    left_out: str = ""
    """The line of `leave_out` that leaves it out."""
    same_as: str = ""
    """Name of an image before it with the same content."""
    drawable: bool = True
    """Whether a thumbnail can be tried."""


def list_entries(
    root: Path,
    config: DatasetConfig,
    digest: Callable[[Path], bytes],
    *,
    on_progress: OnProgress = no_progress,
) -> list[Entry]:
    """Return the images of a folder and what cannot be used, by name; `digest` is for files.

    Raises UserError if the folder is missing or has no image.
    """
    # A missing caption is no reason here: it can be written.
    tolerant = replace(config, caption=replace(config.caption, missing="empty"))
    images = find_images(root, tolerant, on_progress=on_progress)
    unusable = [Entry(bad.name, _stamp(root / bad.name), problem=bad.reason) for bad in images.skipped]
    left_out = [
        Entry(name, _stamp(root / name), left_out=next(p for p in config.leave_out if is_named(name, (p,))))
        for name in images.left_out
    ]
    found = _entries(images, config)
    return sorted([*_with_twins(root, found, digest), *unusable, *left_out], key=lambda entry: entry.name)


def list_in_memory(images: ImageSet) -> list[Entry]:
    """Return the entries of images that a graph made."""
    return _entries(images, images.sources[0].config)


def _entries(images: ImageSet, config: DatasetConfig) -> list[Entry]:
    return [_entry(sample, images.source(sample), config) for sample in images.samples]


def _entry(sample: Sample, source: Source, config: DatasetConfig) -> Entry:
    caption, *others = sample.captions
    bare = not caption and config.caption.missing == "error"
    entry = Entry(
        sample.name,
        f"{sample.bytes:x}-{sample.mtime_ns:x}",
        sample.width,
        sample.height,
        caption=caption,
        others=len(others),
        trained="" if bare else finish(caption, source.config),
        problem="no caption" if bare else "",
        drawable=not sample.encoded,
    )
    try:
        views = views_for(sample.width, sample.height, "", config, step=STEP, encoded=sample.encoded)
    except UserError as error:  # no bucket for this size
        return replace(entry, problem=str(error))
    crop = views[-1][0].crop
    left, top, right, bottom = crop.box
    box = (left / sample.width, top / sample.height, right / sample.width, bottom / sample.height)
    return replace(entry, bucket=crop.bucket, crop=box)


def _with_twins(root: Path, entries: Sequence[Entry], digest: Callable[[Path], bytes]) -> list[Entry]:
    """Return the entries, those with the content of an earlier one marked."""
    by_size: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_size[entry.stamp.partition("-")[0]].append(entry)
    same_as: dict[str, str] = {}
    for equal in by_size.values():
        first: dict[bytes, str] = {}
        for entry in equal if len(equal) > 1 else ():
            with suppress(OSError):  # gone meanwhile
                before = first.setdefault(digest(root / entry.name), entry.name)
                if before != entry.name:
                    same_as[entry.name] = before
    return [replace(entry, same_as=same_as.get(entry.name, "")) for entry in entries]


def _stamp(path: Path) -> str:
    try:
        info = path.stat()
    except OSError:  # a link to nowhere
        return ""
    return f"{info.st_size:x}-{info.st_mtime_ns:x}"
