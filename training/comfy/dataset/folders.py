"""Folders of datasets that the editor may read, and those that it may write to.

The one rule: nothing is written outside ComfyUI's input folder and the registered ones, nor into Graft.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...data.roots import is_inside, resolve_dataset
from ...user_error import UserError
from .. import paths

GRAFT = Path(__file__).resolve().parents[3]


def folder_to_read(name: str) -> Path:
    """Return the folder of a dataset. Raises UserError if there is none."""
    return resolve_dataset(name, paths.dataset_roots())


def folder_to_write(name: str) -> Path:
    """Return the folder of a dataset that may be written to; a new one lies in ComfyUI's input folder.

    It may not exist yet. Raises UserError for a name that no folder may have, or a folder of Graft's own.
    """
    try:
        folder = folder_to_read(name)
    except UserError:
        folder = paths.new_dataset(name)
    require_writable(folder)
    return folder


def require_writable(folder: Path) -> None:
    """Raise UserError for a folder that comes with Graft: an update would find it changed."""
    if is_inside(folder, GRAFT):
        raise UserError("These images come with Graft and stay as they are; give your own a new folder.")


def image_in(folder: Path, key: str) -> tuple[str, Path]:
    """Return (name, path) of the file in a dataset that `key_of` named so.

    Raises UserError if there is no such file, or it lies outside the folder.
    """
    name = name_of(key)
    path = folder / name
    with suppress(ValueError, OSError):  # a name with a zero byte, or too long
        if name and ".." not in Path(name).parts and path.is_file() and is_inside(path, folder):
            return name, path
    raise UserError("no such image; it was renamed or removed meanwhile.")


def key_of(name: str) -> str:
    """Return a file's name in letters that every address and every JSON can hold, whatever its encoding."""
    return name.encode("utf-8", "surrogatepass").hex()


def name_of(key: str) -> str:
    """Return the name of `key_of`. Raises UserError if it is none."""
    try:
        return bytes.fromhex(key).decode("utf-8", "surrogatepass")
    except ValueError:
        raise UserError("not the key of an image.") from None
