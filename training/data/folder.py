"""The scan of a folder for images with their captions, sizes and masks. Only headers are read, no pixels.

The one rule: nothing is left out silently. One error names every unusable file with its reason; the rest is
trained only if the user allowed it. Names are sorted, so the order is the same everywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath

from ..config import digest
from ..model import OnProgress, no_progress
from ..user_error import UserError
from .bad_files import Skipped, bad_files_error
from .caption import require_usable
from .caption_file import (
    METADATA,
    NO_CAPTION,
    Places,
    expected_file,
    find_captions,
    read_metadata,
)
from .clip import CLIPS, read_clip_header, samples_of, stamp
from .config import DatasetConfig
from .image_file import EXTENSIONS, BadImage, Header, read_header
from .latent_file import is_latent_file, read_latent_header, stem_of
from .partners import Partners, find_partners
from .read_ahead import load_ahead
from .samples import ImageSet, Sample, SampleTable, Source
from .sound import SOUNDS, is_sound, pieces_of, read_length, with_lyrics
from .tree import Folder, is_read, list_folder, repeats_in, walk

SEARCHED = 1000
"""Most folders searched to name those with images in an error."""
_MASK_FILES = ("file", "auto")


def scan(
    root: str | os.PathLike[str],
    config: DatasetConfig | None = None,
    *,
    references: Sequence[Path] = (),
    on_progress: OnProgress = no_progress,
) -> ImageSet:
    """Find the captioned images of a folder. `on_progress` may raise to cancel.

    `references` are the folders that `config.references` names, each with a partner for every image.
    Raises UserError if the folder is missing or has no image, or one that names every unusable file (with
    `config.skip_bad` they are in the result's `skipped` instead).
    """
    config = config or DatasetConfig()
    images = find_images(root, config, references=references, on_progress=on_progress)
    if images.skipped and (not config.skip_bad or not len(images)):
        raise bad_files_error(sorted(images.skipped, key=lambda item: item.name), str(root), len(images))
    if not len(images):
        raise UserError(f"{root}: 'leave out' leaves out all {len(images.left_out)} images; put some back.")
    return images


def find_images(
    root: str | os.PathLike[str],
    config: DatasetConfig,
    *,
    references: Sequence[Path] = (),
    on_progress: OnProgress = no_progress,
) -> ImageSet:
    """Return what `scan` does, with unusable files in `skipped` whatever the settings; it may have no sample.

    Raises UserError if the folder is missing or has no image.
    """
    root = Path(root)
    check = partial(on_progress, 0, 1, "Reading the folder")
    folders = list(walk(root, config, check))
    partners = find_partners(root, folders, references, config, check)
    images = [(folder, file) for folder in folders for file in partners.targets(folder)]
    _require_images(images, folders, root, config, check)
    left_out = tuple(folder.name_of(file) for folder, file in images if file in folder.left_out)
    images = [(folder, file) for folder, file in images if file not in folder.left_out]
    captions, bad = _metadata(root, folders, check)
    bad += [item for folder in folders for item in folder.bad] + partners.lonely()
    table = SampleTable()
    read = partial(_samples_or_reason, root, captions, config, partners)
    for found in load_ahead(read, images, lambda done: on_progress(done, len(images), "Reading the folder")):
        if isinstance(found, Skipped):
            bad.append(found)
        else:
            for sample in found:
                table.append(sample)
    ignored = Counter(PurePosixPath(name).suffix.lower() for folder in folders for name in _strangers(folder))
    unread = sum(not is_read(name, config) for folder in folders for name in folder.below)
    source = Source(config, root, references=partners.roots)
    return ImageSet(table, (source,), tuple(bad), tuple(sorted(ignored.items())), unread, left_out=left_out)


def captions_at(root: Path, name: str, config: DatasetConfig) -> tuple[str, ...]:
    """Return the captions of one image as they are on disk now, () without any.

    Raises BadImage if they cannot be read, UserError if there is no such image.
    """
    path = PurePosixPath(name)
    folder = list_folder(root, "" if path.parent.name == "" else str(path.parent), lambda: None, config)
    if path.name not in folder.images:
        raise UserError(f"{name}: no such image; it was renamed or removed meanwhile.")
    table, bad = _metadata(root, [folder], lambda: None)
    if bad:
        raise BadImage(f"{bad[0].name}: {bad[0].reason}")
    places = Places(root / folder.relative, folder.relative, folder.captions, table)
    return find_captions(stem_of(path.name) + path.suffix, places, config.caption)


def fingerprint(
    root: str | os.PathLike[str],
    config: DatasetConfig | None = None,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Return a digest of the names, sizes and dates of all files that a scan would read.

    No file is opened: 100,000 files take about a second. `check` is called before each and may raise to
    cancel. Raises UserError if the folder is missing.
    """
    root, config = Path(root), config or DatasetConfig()
    state = hashlib.blake2b(digest_size=8)
    for folder in walk(root, config, check):
        for file in sorted({*folder.files, *folder.clips}):
            check()
            try:
                size, date = stamp(root / folder.relative / file)
            except (OSError, BadImage):
                continue  # vanished since it was listed; the scan reports it if it matters
            line = f"{folder.name_of(file)}\0{size}\0{date}\n"
            state.update(line.encode("utf-8", "surrogatepass"))
    return digest(state.hexdigest(), config)


def _strangers(folder: Folder) -> list[str]:
    return list(folder.files - {*folder.images, *folder.captions.values(), METADATA})


def _require_images(
    images: list[tuple[Folder, str]],
    folders: list[Folder],
    root: Path,
    config: DatasetConfig,
    check: Callable[[], None],
) -> None:
    if images:
        return
    if bad := [item for folder in folders for item in folder.bad]:
        raise bad_files_error(bad, str(root), 0)
    known = ", ".join(sorted(extension[1:] for extension in EXTENSIONS))
    message = f"{root}: no images in this folder ({known} are read)."
    for setting, what, kinds in (("frames", "video clips", CLIPS), ("seconds", "sounds", SOUNDS)):
        if count := sum(PurePosixPath(name).suffix.lower() in kinds for f in folders for name in f.files):
            message += f" There are {count} {what}: set '{setting}' in Load Dataset to train them."
    if deeper := ", ".join(_with_images(root, config, check)):
        message += f" There are some in {deeper} inside it: choose one of these ('recursive' mixes them all)."
    raise UserError(message)


def _with_images(root: Path, config: DatasetConfig, check: Callable[[], None]) -> list[str]:
    """Return up to ten folders below the root with images, directly or in folders named like 10_cat."""
    names = []
    for folder in islice(walk(root, replace(config, recursive=True), check), SEARCHED):
        path = PurePosixPath(folder.relative)
        while repeats_in(path.name):
            path = path.parent
        names += [str(path)] * bool(folder.images)
    return list(dict.fromkeys(names))[:10]


def _metadata(
    root: Path, folders: list[Folder], check: Callable[[], None]
) -> tuple[dict[str, tuple[str, ...]], list[Skipped]]:
    """Return path inside the root -> captions from every metadata.jsonl, and the unreadable ones."""
    captions: dict[str, tuple[str, ...]] = {}
    bad = []
    for folder in folders:
        if METADATA in folder.files:
            try:
                table = read_metadata(root / folder.relative / METADATA, check)
                captions.update({folder.name_of(name): texts for name, texts in table.items()})
            except BadImage as error:
                bad.append(Skipped(folder.name_of(METADATA), str(error)))
    return captions, bad


def _repeats_of(root: Path, relative: str) -> int:
    """Return N of the innermost folder named N_name, as in kohya's sd-scripts, or 1."""
    parts = (root.name, *PurePosixPath(relative).parts)
    return next((repeats for part in reversed(parts) if (repeats := repeats_in(part))), 1)


def _samples_or_reason(
    root: Path,
    metadata: Mapping[str, tuple[str, ...]],
    config: DatasetConfig,
    partners: Partners,
    image: tuple[Folder, str],
) -> list[Sample] | Skipped:
    folder, file = image
    try:
        references = partners.of(folder, file)
        samples = _samples(root, folder, file, metadata, config)
        return [replace(sample, references=references) for sample in samples] if references else samples
    except BadImage as error:
        return Skipped(folder.name_of(file), str(error))


def _samples(
    root: Path, folder: Folder, file: str, metadata: Mapping[str, tuple[str, ...]], config: DatasetConfig
) -> list[Sample]:
    """Return the sample of an image, or those of a clip."""
    if twins := folder.twins(file):
        raise BadImage(f"shares its caption or mask with {', '.join(twins)}; rename or remove one of them")
    stem, path = stem_of(file), root / folder.relative / file
    try:
        size, date = stamp(path)
    except OSError as error:
        raise BadImage(f"disappeared or cannot be read ({error.strerror or error})") from error
    header, starts = _header(path, file in folder.clips, config)
    mask = folder.masks.get(stem) if config.mask.source in _MASK_FILES else None
    places = Places(path.parent, folder.relative, folder.captions, metadata)
    sample = Sample(
        name=folder.name_of(file),
        width=header.width,
        height=header.height,
        captions=with_lyrics(_captions(stem + path.suffix, places, config), path),
        repeats=config.repeats * _repeats_of(root, folder.relative),
        mask=folder.name_of(mask) if mask else "",
        has_alpha=header.has_alpha,
        encoded=header.encoded,
        bytes=size,
        mtime_ns=date,
    )
    frames = 0 if sample.is_sound else config.frames
    return [replace(sample, frames=frames, start=start) for start in starts] or [sample]


def _header(path: Path, may_be_clip: bool, config: DatasetConfig) -> tuple[Header, list[int]]:
    """Return the header of a file, and where the samples of a clip or a sound begin; [] for others."""
    if is_sound(path.name):
        length = read_length(path)
        return Header(length, 0, has_alpha=False), pieces_of(length, config)
    if may_be_clip and not (clip := read_clip_header(path)).is_still:
        return Header(*clip.size, has_alpha=False), samples_of(clip, config)
    return (read_latent_header if is_latent_file(path.name) else read_header)(path), []


def _captions(file: str, places: Places, config: DatasetConfig) -> tuple[str, ...]:
    captions = find_captions(file, places, config.caption)
    if not captions:
        if config.caption.missing == "error":
            wanted = expected_file(file, config.caption)
            raise BadImage(f"no caption; add {wanted}, or set {NO_CAPTION} in Load Dataset")
        captions = ("",)  # with "trigger", an empty caption becomes the trigger word alone
    require_usable(captions, config)
    return captions
