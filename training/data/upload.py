"""Files that a browser sends for a dataset: checked where they arrive, then moved to their folder as a whole.

The one rule: a file that is there is replaced only on request, and one that cannot be trained is not taken.
"""

from __future__ import annotations

import filecmp
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ..files.text import shown
from ..files.whole_file import commit
from ..user_error import UserError
from .caption_file import CAPTION_FILES, LARGEST, METADATA
from .image_file import EXTENSIONS, HEIC, BadImage, read_header
from .zip_file import unpack

ZIP = ".zip"
TAKEN = tuple(sorted((*EXTENSIONS, *HEIC, *CAPTION_FILES, PurePosixPath(METADATA).suffix)))
"""Extensions of the files of a dataset."""
_MOST_UNPACKED = 8
"""Most bytes of a zip's files, as a multiple of the largest upload."""
_placing = threading.Lock()
"""Held while looking whether a file is there and moving another one to that place."""


@dataclass
class Received:
    """What became of the files of one upload, by name."""

    saved: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    """Were there already, byte for byte."""
    exists: list[str] = field(default_factory=list)
    """Are there already with another content, and were left."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Name, and why."""
    others: list[str] = field(default_factory=list)
    """In a zip: neither images nor captions."""


def is_taken(name: str) -> bool:
    """Return whether files of such a name belong to a dataset."""
    return PurePosixPath(name).suffix.lower() in TAKEN


def take_upload(
    file: Path, name: str, place_of: Callable[[str], Path], *, replace: bool, most_bytes: int
) -> Received:
    """Move an uploaded file to `place_of(name)`, or those in a zip to theirs, and return what became of them.

    `place_of` raises UserError for a name that no file may have; `most_bytes` is the largest upload. Raises
    UserError for a zip that cannot be taken, OSError if the disk is full.
    """
    received = Received()
    files = [(name, file)]
    if PurePosixPath(name).suffix.lower() == ZIP:
        try:
            files, received.others = unpack(
                file, file.parent / "unpacked", is_taken, most_bytes=_MOST_UNPACKED * most_bytes
            )
        except UserError as error:
            raise UserError(f"{shown(name)} {error}.") from error
        if not files:
            raise UserError(f"{shown(name)} holds no images or captions.")
    for each, path in files:
        try:
            _require_usable(path, each)
            outcome = _place(path, place_of(each), replace)
        except UserError as error:
            received.refused.append((each, str(error).rstrip(".")))
        else:
            getattr(received, outcome).append(each)
    return received


def _require_usable(path: Path, name: str) -> None:
    """Raise UserError for a file that no dataset can use."""
    kind = PurePosixPath(name).suffix.lower()
    if not is_taken(name):
        taken = ", ".join(extension[1:] for extension in TAKEN)
        raise UserError(f"is neither an image nor a caption; {taken} and zip are taken")
    if kind in (*EXTENSIONS, *HEIC):
        _require_image(path, kind)
    elif path.stat().st_size > 4 * LARGEST:
        raise UserError(f"is too large for a caption ({path.stat().st_size / 1e6:.1f} MB)")
    else:
        _require_text(path)


def _require_image(path: Path, kind: str) -> None:
    named = path.with_name(f"{path.name}{kind}")  # messages name the extension
    os.rename(path, named)
    try:
        read_header(named)
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise BadImage(f"cannot be read ({error.strerror or error})") from error
    finally:
        os.rename(named, path)


def _require_text(path: Path) -> None:
    raw = path.read_bytes()
    try:
        raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError("is not UTF-8 text; save it as UTF-8") from error


def _place(file: Path, target: Path, replace: bool) -> str:
    """Move a file to its place and return the list of `Received` that it belongs to."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _placing:
        if target.is_dir():
            raise UserError("is the name of a folder there; rename the file")
        if os.path.lexists(target):
            if target.is_file() and filecmp.cmp(file, target, shallow=False):
                return "same"
            if not replace:
                return "exists"
        commit(file, target)
    return "saved"
