"""Captions that are made for a dataset, and written beside its images.

The one rule: a caption is replaced only if the cache knows that this very text was made for this very image.
Any other is a person's, also one that was made and then edited.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from ..config import require, setting
from ..model import OnProgress, no_progress
from ..user_error import UserError
from .caption import require_usable
from .caption_edit import Conflict, write_caption
from .config import MOST_ADDED
from .encoding import cache_key
from .folder import captions_at
from .hashes import ContentHashes
from .image_file import BadImage
from .open_sample import content_of, open_clip, open_sample
from .samples import ImageSet, Sample, SampleTable, Source
from .store import CAPTIONS, Store

PLACE = "{caption}"
AREA = 1 << 20
"""Most pixels of an image that is described; text encoders make it smaller still."""
SHOWN = 20
"""Most new captions in the report."""


@dataclass(frozen=True, kw_only=True)
class CaptioningConfig:
    """How captions are made."""

    instruction: str = setting(
        "Describe this image in one or two plain sentences: the subject, what it does, what is around it. "
        "Write the description alone.",
        "What the text encoder is asked of each image. Leave out what the LoRA is to learn.",
        multiline=True,
    )
    template: str = setting(
        PLACE,
        "Text of each new caption: {caption} stands for what was written, [trigger] for the trigger word, "
        "such as: photo of [trigger], {caption}",
    )
    longest: int = setting(160, "Most tokens of a caption; a token is about a word.", low=8, high=2048)
    seed: int = setting(0, "Another seed gives other captions.", high=2**32 - 1)
    write: bool = setting(
        True,
        "Write each caption into a .txt file beside its image, where you can edit it. Off: only this graph "
        "has them.",
    )

    def __post_init__(self) -> None:
        strangers = [name for name in re.findall(r"\{\w*\}", self.template) if name != PLACE]
        require(
            PLACE in self.template and not strangers and len(self.template) <= MOST_ADDED,
            f"template: {self.template[:80]!r} must have {PLACE}, at most {MOST_ADDED} letters, and no other "
            "name in {}; [trigger] is the trigger word.",
        )


Maker = Callable[[int, Source, Sample, bytes], str]
"""(place among the files, source, sample, digest of its content) -> what is written of it."""


def given_captions(texts: Sequence[str]) -> Maker:
    """Return the maker that takes one text for each file, in their order."""
    return lambda place, *_: texts[place]


def described(describe: Callable[[Tensor], str], fingerprint: str, cache: Path) -> Maker:
    """Return the maker that describes images (1, H, W, 3) in 0..1, each once: the cache has what was said.

    `fingerprint` stands for what decides the text beside the image.
    """
    store = Store(cache)

    def make(_: int, source: Source, sample: Sample, content: bytes) -> str:
        key = cache_key(CAPTIONS, content, fingerprint)
        if not store.has(CAPTIONS, key):
            _remember(store, key, describe(pixels_of(source, sample)))
        return bytes(store.read(CAPTIONS, key)["text"].tolist()).decode()

    return make


def pixels_of(source: Source, sample: Sample, area: int = AREA) -> Tensor:
    """Return an image, or the middle frame of a clip, whole and made smaller to `area`: (1, H, W, 3) float32.

    Raises UserError if it cannot be read, or is not an image.
    """
    if sample.is_sound or sample.encoded:
        raise UserError(f"{sample.name}: not an image, so it cannot be described or shown.")
    try:
        if sample.frames:
            middle = sample.frames // 2
            upright = next(islice(open_clip(source, sample, sample.frames), middle, None))
        else:
            upright, _ = open_sample(source, sample)
    except BadImage as error:
        raise UserError(f"{sample.name}: {error}.") from error
    width, height = upright.size
    scale = min(1.0, math.sqrt(area / (width * height)))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return torch.from_numpy(upright.crop((0, 0, width, height), size))[None]


def files_of(images: ImageSet) -> list[list[int]]:
    """Return the positions of each file's samples: several for a clip of several pieces, which share one
    caption.
    """
    files: dict[tuple[int, str], list[int]] = defaultdict(list)
    sources = images.samples.column("source").tolist()
    for position, name in enumerate(images.samples.names):
        files[sources[position], name].append(position)
    return list(files.values())


def caption_images(
    images: ImageSet,
    make: Maker,
    config: CaptioningConfig,
    cache: Path,
    *,
    require_writable: Callable[[Path], None] = lambda folder: None,
    on_progress: OnProgress = no_progress,
) -> tuple[ImageSet, str]:
    """Return the images with captions for those that have none, or one that was made here; and a report.

    Each caption is on disk before the next is made. `require_writable` raises UserError for a folder that
    stays as it is. `on_progress` may raise to cancel. Raises UserError for what cannot be a caption.
    """
    if images.words or images.pairs:
        raise UserError("dataset: it is a slider's already; put Caption Dataset before the slider.")
    for source in images.sources:
        _require_caption("template", config.template, source)
    files, pen = files_of(images), _Pen(cache, config, require_writable)
    captions = [sample.captions for sample in images.samples]
    counts, made = Counter[str](), list[str]()
    with ContentHashes(cache) as hashes:
        for place, positions in enumerate(files):
            on_progress(place, len(files), "Captioning")
            sample = images.samples[positions[0]]
            outcome, own = _caption(sample, images.source(sample), partial(make, place), pen, hashes)
            counts[outcome] += 1
            if outcome == NEW:
                made.append(f"{sample.name}: {own[0]}")
            for position in positions:
                captions[position] = own
    on_progress(len(files), len(files), "Captioning")
    table = SampleTable(replace(sample, captions=captions[i]) for i, sample in enumerate(images.samples))
    lines = [
        f"{len(files)} images: " + ", ".join(f"{counts[each]} {each}" for each in OUTCOMES if counts[each])
    ]
    lines += [f"{n} not written to disk: {reason}" for reason, n in pen.unwritten.items()]
    lines += made[:SHOWN] + [f"... and {len(made) - SHOWN} more"] * (len(made) > SHOWN)
    return replace(images, samples=table), "\n".join(lines)


WRITTEN = "written"
NEW, SAME, OWN = "captioned", "captioned before", "with a caption of their own"
NONE, SOUND = "without a caption, as none was written", "sounds, which are not captioned"
OUTCOMES = (NEW, SAME, OWN, NONE, SOUND)


def _caption(
    sample: Sample,
    source: Source,
    make: Callable[[Source, Sample, bytes], str],
    pen: _Pen,
    hashes: ContentHashes,
) -> tuple[str, tuple[str, ...]]:
    """Return what became of one file, and its captions."""
    if sample.is_sound:
        return SOUND, sample.captions
    try:
        content, _ = content_of(source, sample, hashes.of)
    except BadImage as error:
        raise UserError(f"{sample.name}: {error}.") from error
    if any(sample.captions) and not pen.wrote(content, sample.captions):
        return OWN, sample.captions
    if not (text := make(source, sample, content).strip()):
        return NONE, sample.captions
    text = pen.config.template.replace(PLACE, text).strip()
    if (text,) == sample.captions:
        return SAME, sample.captions
    _require_caption(sample.name, text, source)
    try:
        pen.write(source, sample, content, text)
    except Conflict:  # edited since the folder was read
        assert source.root is not None
        return OWN, captions_at(source.root, sample.name, source.config) or ("",)
    return NEW, (text,)


class _Pen:
    """Writes captions beside their images, and knows those that it wrote."""

    def __init__(
        self, cache: Path, config: CaptioningConfig, require_writable: Callable[[Path], None]
    ) -> None:
        self.config = config
        self.unwritten = Counter[str]()
        """Why captions are in this graph alone -> how many."""
        self._store, self._require_writable = Store(cache), require_writable

    def wrote(self, content: bytes, captions: tuple[str, ...]) -> bool:
        """Return whether an image's caption is one that was made here."""
        return len(captions) == 1 and self._store.has(CAPTIONS, cache_key(WRITTEN, content, captions[0]))

    def write(self, source: Source, sample: Sample, content: bytes, text: str) -> None:
        """Raises Conflict if the caption on disk is no longer the sample's."""
        _remember(self._store, cache_key(WRITTEN, content, text), text)
        if not (self.config.write and source.root):
            return
        try:
            self._require_writable(source.root)
            write_caption(source.root, sample.name, text, sample.captions[0], source.config)
        except Conflict:
            raise
        except (UserError, OSError) as error:
            self.unwritten[str(error)] += 1


def _require_caption(what: str, text: str, source: Source) -> None:
    try:
        require_usable((text,), source.config)
    except BadImage as error:
        raise UserError(f"{what}: {error}.") from error


def _remember(store: Store, key: bytes, text: str) -> None:
    store.write(CAPTIONS, key, {"text": torch.tensor(list(text.encode()), dtype=torch.uint8)})
