"""The references of each image of a folder: in folders with the same file names, or beside it.

The one rule: an image without partners and a partner without an image are named, and never left out silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

from .bad_files import Skipped
from .config import BESIDE, MOST_REFERENCES, DatasetConfig
from .image_file import BadImage, read_header
from .latent_file import is_latent_file, stem_of
from .samples import Reference
from .tree import Folder, walk

_BESIDE = re.compile(r"(.+)_ref(\d)")


@dataclass(frozen=True)
class Partners:
    """The reference images that were found, by the names of the images that they belong to."""

    roots: tuple[Path, ...] = ()
    """Where reference 1, 2 and 3 lie; none where images have no references."""
    names: Sequence[dict[str, list[str]]] = ()
    """For each of them: path of an image without extension -> paths of its references inside the folder."""
    beside: bool = False
    images: Sequence[Folder] = field(default=(), repr=False)

    def targets(self, folder: Folder) -> list[str]:
        """Return the image files of a folder that are trained: no masks, and no references beside them."""
        files = [file for file in folder.images if file not in folder.mask_files]
        return [file for file in files if not _owner(file)] if self.beside else files

    def of(self, folder: Folder, file: str) -> tuple[Reference, ...]:
        """Return the references of an image. Raises BadImage if one is missing or cannot be used."""
        stem = folder.name_of(stem_of(file))
        found = [known.get(stem, []) for known in self.names]
        if self.beside:
            found = found[: self._most]
        references = []
        for root, paths, number in zip(self.roots, found, range(1, MOST_REFERENCES + 1), strict=False):
            where = f"{stem}_ref{number}.png beside it" if self.beside else f"{stem}.png in {root.name}"
            if len(paths) != 1:
                twins = f"has {len(paths)} references named {' and '.join(paths)}; keep one of them"
                raise BadImage(twins if paths else f"has no reference; add {where}")
            references.append(_read(root, paths[0]))
        return tuple(references)

    def lonely(self) -> list[Skipped]:
        """Return the references without an image of their name."""
        known = {folder.name_of(stem_of(file)) for folder in self.images for file in self.targets(folder)}
        return [
            Skipped(
                path if self.beside else f"{root.name}/{path}", "is a reference without an image of its name"
            )
            for root, names in zip(self.roots, self.names, strict=True)
            for stem, paths in names.items()
            for path in paths
            if stem not in known
        ]

    @cached_property
    def _most(self) -> int:
        """How many references an image beside its references has: all as many, at least one."""
        return max((index for index, names in enumerate(self.names, 1) if names), default=1)


def find_partners(
    root: Path,
    folders: Sequence[Folder],
    references: Sequence[Path],
    config: DatasetConfig,
    check: Callable[[], None],
) -> Partners:
    """Return the references that lie beside the images of `folders`, or in `references`."""
    if config.references == (BESIDE,):
        beside: list[dict[str, list[str]]] = [{} for _ in range(MOST_REFERENCES)]
        for folder in folders:
            for file in folder.images:
                if owner := _owner(file):
                    stem, number = owner
                    beside[number - 1].setdefault(folder.name_of(stem), []).append(folder.name_of(file))
        return Partners((root,) * MOST_REFERENCES, beside, beside=True, images=folders)
    names = []
    for place in references:
        known: dict[str, list[str]] = {}
        for folder in walk(place, replace(config, frames=0, leave_out=()), check):
            for file in folder.images:
                if file not in folder.mask_files and not is_latent_file(file):
                    known.setdefault(folder.name_of(stem_of(file)), []).append(folder.name_of(file))
        names.append(known)
    return Partners(tuple(references), names, images=folders)


def _owner(file: str) -> tuple[str, int] | None:
    """Return the name that a reference's name begins with, and its number: of cat_ref1.png, (cat, 1)."""
    match = _BESIDE.fullmatch(PurePosixPath(file).stem)
    number = int(match[2]) if match else 0
    return (match[1], number) if match and 1 <= number <= MOST_REFERENCES else None


def _read(root: Path, path: str) -> Reference:
    try:
        header, info = read_header(root / path), (root / path).stat()
    except (BadImage, OSError) as error:
        raise BadImage(f"its reference {root.name}/{path}: {error}") from error
    return Reference(path, header.width, header.height, header.has_alpha, info.st_size, info.st_mtime_ns)
