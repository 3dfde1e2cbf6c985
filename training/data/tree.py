"""The tree of a dataset's folder: which files are images, clips, masks and captions, by their names alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath

from ..user_error import UserError
from .bad_files import Skipped
from .caption_file import CAPTION_FILES
from .clip import FRAME_FOLDER, is_clip
from .config import DatasetConfig
from .image_file import EXTENSIONS, HEIC
from .latent_file import is_latent_file, stem_of
from .roots import is_inside
from .sound import is_sound

MASK_SUFFIX = "-mask"


@dataclass(frozen=True)
class Folder:
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
    sounds: frozenset[str] = frozenset()
    leave_out: tuple[str, ...] = ()
    """Names and patterns of the images to leave out."""

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


def walk(root: Path, config: DatasetConfig, check: Callable[[], None]) -> Iterator[Folder]:
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
        folder = _with_clips(list_folder(root, relative, check, config), config)
        yield folder
        pending += [name for name in reversed(folder.below) if is_read(name, config)]


def is_read(folder: str, config: DatasetConfig) -> bool:
    """Return whether a subfolder is read."""
    return config.recursive or bool(repeats_in(folder))


def list_folder(root: Path, relative: str, check: Callable[[], None], config: DatasetConfig) -> Folder:
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
    return Folder(relative, frozenset(files), tuple(bad), tuple(sorted(below)), leave_out=config.leave_out)


def _with_clips(folder: Folder, config: DatasetConfig) -> Folder:
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


def repeats_in(folder: str) -> int:
    """Return N for a folder named N_name, else 0. Four digits are a year."""
    match = re.match(r"(\d{1,3})_", PurePosixPath(folder).name)
    return int(match[1]) if match else 0


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether an image is one of those named, by its name inside the dataset or a pattern."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
