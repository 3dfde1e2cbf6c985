"""The scan of a folder for images with their captions, sizes and masks. Only headers are read, no pixels.

The one rule: nothing is left out silently. One error names every unusable file with its reason; the rest is
trained only if the user allowed it. Names are sorted, so the order is the same everywhere.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import islice
from pathlib import Path, PurePosixPath

from ..config import digest
from ..model import OnProgress, no_progress
from ..user_error import UserError
from .caption import require_usable
from .caption_file import (
    CAPTION_FILES,
    METADATA,
    NO_CAPTION,
    Places,
    expected_file,
    find_captions,
    read_metadata,
)
from .clip import CLIPS, FRAME_FOLDER, is_clip, read_clip_header, samples_of, stamp
from .config import DatasetConfig
from .image_file import EXTENSIONS, HEIC, BadImage, Header, read_header
from .latent_file import is_latent_file, read_latent_header, stem_of
from .read_ahead import load_ahead
from .roots import is_inside
from .samples import ImageSet, Sample, SampleTable, Skipped, Source, bad_files_error
from .sound import SOUNDS, is_sound, pieces_of, read_length, with_lyrics

MASK_SUFFIX = "-mask"
SEARCHED = 1000
"""Most folders searched to name those with images in an error."""
_MASK_FILES = ("file", "auto")


@dataclass(frozen=True)
class _Folder:
    """One directory of the tree."""

    relative: str
    """Path inside the root with forward slashes, "" for the root itself."""
    files: frozenset[str]
    bad: tuple[Skipped, ...]
    """Forbidden links and unreadable folders."""
    below: tuple[str, ...]
    """Paths of its subfolders, sorted."""
    clips: frozenset[str] = frozenset()
    """Names of clips in it: files, and subfolders of frames, which are not in `below`."""
    leave_out: tuple[str, ...] = ()
    """Names and patterns of the images to leave out."""
    sounds: frozenset[str] = frozenset()

    @cached_property
    def images(self) -> list[str]:
        """Image files and clips in sorted order, masks included; no HEIC original beside an image of the same
        name.

        Latent files count as images if the image itself is missing.
        """
        common = [name for name in self.files if PurePosixPath(name).suffix.lower() in EXTENSIONS]
        stems = {PurePosixPath(name).stem for name in common}
        photos = [name for name in self.files if PurePosixPath(name).suffix.lower() in HEIC]
        images = common + [name for name in photos if PurePosixPath(name).stem not in stems]
        stems = {PurePosixPath(name).stem for name in images}
        latents = [name for name in self.files if is_latent_file(name)]
        latents = [name for name in latents if not stems & {stem_of(name), PurePosixPath(name).stem}]
        return sorted({*images, *latents, *self.clips, *self.sounds})

    @cached_property
    def captions(self) -> Mapping[str, str]:
        """Caption files by name, with the extension in lower case: a camera's A.JPG may have A.TXT."""
        paths = [(name, PurePosixPath(name)) for name in sorted(self.files)]
        return {
            path.stem + path.suffix.lower(): name
            for name, path in paths
            if path.suffix.lower() in CAPTION_FILES
        }

    @cached_property
    def by_stem(self) -> Mapping[str, list[str]]:
        stems: dict[str, list[str]] = {}
        for name in self.images:
            stems.setdefault(stem_of(name), []).append(name)
        return stems

    @cached_property
    def masks(self) -> Mapping[str, str]:
        """Stem of an image -> its mask. name-mask.png is a mask only beside an image called name."""
        owners = {stem: stem.removesuffix(MASK_SUFFIX) for stem in self.by_stem if stem.endswith(MASK_SUFFIX)}
        return {owner: self.by_stem[stem][0] for stem, owner in owners.items() if owner in self.by_stem}

    @cached_property
    def mask_files(self) -> frozenset[str]:
        return frozenset(self.masks.values())

    @cached_property
    def left_out(self) -> frozenset[str]:
        """Images that the user leaves out."""
        names = ((file, self.name_of(file)) for file in self.images if file not in self.mask_files)
        return frozenset(file for file, name in names if is_named(name, self.leave_out))

    def twins(self, file: str) -> list[str]:
        """Return other images that share a caption or mask file with this one."""
        stem = stem_of(file)
        shared = stem in self.masks or any(stem + extension in self.captions for extension in CAPTION_FILES)
        others = (name for name in self.by_stem[stem] if name != file and name not in self.left_out)
        return list(others) if shared else []

    def name_of(self, file: str) -> str:
        return f"{self.relative}/{file}" if self.relative else file


def scan(
    root: str | os.PathLike[str],
    config: DatasetConfig | None = None,
    *,
    on_progress: OnProgress = no_progress,
) -> ImageSet:
    """Find the captioned images of a folder. `on_progress` may raise to cancel.

    Raises UserError if the folder is missing or has no image, or one that names every unusable file (with
    `config.skip_bad` they are in the result's `skipped` instead).
    """
    config = config or DatasetConfig()
    images = find_images(root, config, on_progress=on_progress)
    if images.skipped and (not config.skip_bad or not len(images)):
        raise bad_files_error(sorted(images.skipped, key=lambda item: item.name), str(root), len(images))
    if not len(images):
        raise UserError(f"{root}: 'leave out' leaves out all {len(images.left_out)} images; put some back.")
    return images


def find_images(
    root: str | os.PathLike[str], config: DatasetConfig, *, on_progress: OnProgress = no_progress
) -> ImageSet:
    """Return what `scan` does, with unusable files in `skipped` whatever the settings; it may have no sample.

    Raises UserError if the folder is missing or has no image.
    """
    root = Path(root)
    check = partial(on_progress, 0, 1, "Reading the folder")
    folders = list(_walk(root, config, check))
    images = [(folder, file) for folder in folders for file in folder.images if file not in folder.mask_files]
    _require_images(images, folders, root, config, check)
    left_out = tuple(folder.name_of(file) for folder, file in images if file in folder.left_out)
    images = [(folder, file) for folder, file in images if file not in folder.left_out]
    captions, bad = _metadata(root, folders, check)
    bad += [item for folder in folders for item in folder.bad]
    table = SampleTable()
    read = partial(_samples_or_reason, root, captions, config)
    for found in load_ahead(read, images, lambda done: on_progress(done, len(images), "Reading the folder")):
        if isinstance(found, Skipped):
            bad.append(found)
        else:
            for sample in found:
                table.append(sample)
    ignored = Counter(PurePosixPath(name).suffix.lower() for folder in folders for name in _strangers(folder))
    unread = sum(not _is_read(name, config) for folder in folders for name in folder.below)
    return ImageSet(
        table, (Source(config, root),), tuple(bad), tuple(sorted(ignored.items())), unread, left_out=left_out
    )


def captions_at(root: Path, name: str, config: DatasetConfig) -> tuple[str, ...]:
    """Return the captions of one image as they are on disk now, () without any.

    Raises BadImage if they cannot be read, UserError if there is no such image.
    """
    path = PurePosixPath(name)
    folder = _list(root, "" if path.parent.name == "" else str(path.parent), lambda: None, config)
    if path.name not in folder.images:
        raise UserError(f"{name}: no such image; it was renamed or removed meanwhile.")
    table, bad = _metadata(root, [folder], lambda: None)
    if bad:
        raise BadImage(f"{bad[0].name}: {bad[0].reason}")
    places = Places(root / folder.relative, folder.relative, folder.captions, table)
    return find_captions(stem_of(path.name) + path.suffix, places, config.caption)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether an image is one of those named, by its name inside the dataset or a pattern."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


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
    for folder in _walk(root, config, check):
        for file in sorted({*folder.files, *folder.clips}):
            check()
            try:
                size, date = stamp(root / folder.relative / file)
            except (OSError, BadImage):
                continue  # vanished since it was listed; the scan reports it if it matters
            line = f"{folder.name_of(file)}\0{size}\0{date}\n"
            state.update(line.encode("utf-8", "surrogatepass"))
    return digest(state.hexdigest(), config)


def _walk(root: Path, config: DatasetConfig, check: Callable[[], None]) -> Iterator[_Folder]:
    """Yield the root and the subfolders to read, sorted, each once even if links form circles."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; create it and put images and captions into it.")
    seen: set[str] = set()
    pending = [""]
    while pending:
        relative = pending.pop()
        real = os.path.realpath(root / relative)
        if real in seen:
            continue
        seen.add(real)
        folder = _with_clips(_list(root, relative, check, config), config)
        yield folder
        pending += [name for name in reversed(folder.below) if _is_read(name, config)]


def _is_read(folder: str, config: DatasetConfig) -> bool:
    """Return whether a subfolder is read."""
    return config.recursive or bool(_repeats_in(folder))


def _list(root: Path, relative: str, check: Callable[[], None], config: DatasetConfig) -> _Folder:
    files, below, bad = [], [], []
    try:
        with os.scandir(root / relative) as entries:
            for entry in entries:
                check()
                name = f"{relative}/{entry.name}" if relative else entry.name
                if entry.name.startswith(".") or entry.name == "__MACOSX":
                    continue  # .DS_Store, ._cat.jpg, .git, thumbnails
                if entry.is_symlink() and not is_inside(entry.path, root):
                    bad.append(Skipped(name, "is a link that leads out of the folder; copy the file into it"))
                elif _is_folder(entry):
                    below.append(name)
                else:
                    files.append(entry.name)
    except OSError as error:
        bad.append(Skipped(relative or root.name, f"the folder cannot be read ({error.strerror or error})"))
    return _Folder(relative, frozenset(files), tuple(bad), tuple(sorted(below)), leave_out=config.leave_out)


def _with_clips(folder: _Folder, config: DatasetConfig) -> _Folder:
    """Return the folder with its clips, if the settings ask for frames, and its sounds, if for seconds."""
    if config.seconds:
        folder = replace(folder, sounds=frozenset(filter(is_sound, folder.files)))
    if not config.frames:
        return folder
    captioned = {PurePosixPath(name).stem for name in folder.captions}
    files = {name for name in folder.files if is_clip(name, config)}
    paths = [PurePosixPath(path) for path in folder.below]
    frames = {path.name for path in paths if path.suffix == FRAME_FOLDER or path.name in captioned}
    below = tuple(str(path) for path in paths if path.name not in frames)
    return replace(folder, below=below, clips=frozenset(files | frames))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _strangers(folder: _Folder) -> list[str]:
    return list(folder.files - {*folder.images, *folder.captions.values(), METADATA})


def _require_images(
    images: list[tuple[_Folder, str]],
    folders: list[_Folder],
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
    for folder in islice(_walk(root, replace(config, recursive=True), check), SEARCHED):
        path = PurePosixPath(folder.relative)
        while _repeats_in(path.name):
            path = path.parent
        names += [str(path)] * bool(folder.images)
    return list(dict.fromkeys(names))[:10]


def _metadata(
    root: Path, folders: list[_Folder], check: Callable[[], None]
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
    return next((repeats for part in reversed(parts) if (repeats := _repeats_in(part))), 1)


def _repeats_in(folder: str) -> int:
    """Return N for a folder named N_name, else 0. Four digits are a year."""
    match = re.match(r"(\d{1,3})_", PurePosixPath(folder).name)
    return int(match[1]) if match else 0


def _samples_or_reason(
    root: Path, metadata: Mapping[str, tuple[str, ...]], config: DatasetConfig, image: tuple[_Folder, str]
) -> list[Sample] | Skipped:
    folder, file = image
    try:
        return _samples(root, folder, file, metadata, config)
    except BadImage as error:
        return Skipped(folder.name_of(file), str(error))


def _samples(
    root: Path, folder: _Folder, file: str, metadata: Mapping[str, tuple[str, ...]], config: DatasetConfig
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
