"""Finding the caption that somebody wrote for an image: a text file beside it, a table, or a name.

The one rule: a caption that cannot be read is an error with a reason, never an empty caption.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .config import CaptionConfig
from .image_file import BadImage

CAPTION_FILES = (".txt", ".caption", ".json")
METADATA = "metadata.jsonl"
NO_CAPTION = "'missing captions' to 'trigger' (the trigger word alone) or 'empty'"
"""What an error about a missing caption offers instead of one."""
_KEYS = ("caption", "captions", "text", "prompt", "tags")
"""Where a JSON caption may be, in order of preference."""


@dataclass(frozen=True)
class Places:
    """Where the captions of one folder's images can be."""

    folder: Path
    relative: str
    """The folder's path inside the dataset with forward slashes; "" for the dataset's own folder."""
    files: Mapping[str, str]
    """Its caption files, by their names with the extension in lower case."""
    table: Mapping[str, tuple[str, ...]]
    """From every metadata.jsonl of the dataset: the image's path inside the dataset -> captions."""

    @property
    def label(self) -> str:
        """The folder's own name, without kohya's repeats in front."""
        return re.sub(r"^\d{1,3}_", "", self.folder.name)

    def name_of(self, file: str) -> str:
        """Return a file's path inside the dataset."""
        return f"{self.relative}/{file}" if self.relative else file


def find_captions(image: str, places: Places, config: CaptionConfig) -> tuple[str, ...]:
    """Return the captions of the file named `image`: several if they are alternatives, () if there is none.

    Raises BadImage if there is one that cannot be read.
    """
    for source in ("txt", "caption", "json", "jsonl") if config.source == "auto" else (config.source,):
        if captions := tuple(text.strip() for text in _SOURCES[source](image, places) if text.strip()):
            for text in captions:
                _require_letters(text)
            return captions
    return ()


def expected_file(image: str, config: CaptionConfig) -> str:
    """Return the name of the file that would hold this image's caption, for messages."""
    if config.source == "jsonl":
        return METADATA
    extension = config.source if config.source in ("caption", "json") else "txt"
    return f"{PurePosixPath(image).stem}.{extension}"


def read_metadata(path: Path) -> dict[str, tuple[str, ...]]:
    """Return image name -> captions of a metadata.jsonl: a line is an object with "file_name" and a caption.

    Raises BadImage naming the line that is not such an object.
    """
    table = {}
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            name = entry["file_name"]
        except (ValueError, KeyError, TypeError) as error:
            raise BadImage(
                f'{path.name}, line {number}: not {{"file_name": ..., "text": ...}} ({error})'
            ) from error
        table[str(name).replace("\\", "/")] = _captions_of(entry, f"{path.name}, line {number}")
    return table


def _from_file(extension: str) -> Callable[[str, Places], tuple[str, ...]]:
    def find(image: str, places: Places) -> tuple[str, ...]:
        name = places.files.get(PurePosixPath(image).stem + extension)
        if name is None:
            return ()
        text = _read_text(places.folder / name)
        if extension != ".json":
            return (text,)
        try:
            return _captions_of(json.loads(text), name) if text.strip() else ()
        except ValueError as error:
            raise BadImage(f"{name} is not valid JSON ({error})") from error

    return find


def _captions_of(entry: Any, where: str) -> tuple[str, ...]:
    """Return the captions in a JSON value.

    A string, or an object with one of _KEYS. Tags are joined to one caption.
    """
    if isinstance(entry, str):
        return (entry,)
    key = next((key for key in _KEYS if isinstance(entry, Mapping) and entry.get(key)), None)
    if key is None:
        return ()
    value = entry[key]
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return (", ".join(value),) if key == "tags" else tuple(value)
    raise BadImage(f"{where}: {key!r} must be text or a list of texts")


def _require_letters(text: str) -> None:
    """Raise BadImage for half of a letter: JSON can hold it, and a file's name; no text encoder takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadImage(
            f"its caption has a broken letter ({ascii(text[error.start])} at {error.start}: half of a "
            "character, or a name that is not UTF-8); write it anew"
        ) from error


def _read_text(path: Path) -> str:
    """Return a text file's content, UTF-8 unless it starts with the mark of UTF-16 (Notepad's "Unicode")."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadImage(f"its caption {path.name} cannot be read ({error.strerror or error})") from error
    utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return raw.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadImage(f"its caption {path.name} is not UTF-8 text; save it as UTF-8") from error


_SOURCES: Mapping[str, Callable[[str, Places], tuple[str, ...]]] = {
    "txt": _from_file(".txt"),
    "caption": _from_file(".caption"),
    "json": _from_file(".json"),
    "jsonl": lambda image, places: places.table.get(places.name_of(image), ()),
    "file name": lambda image, places: (PurePosixPath(image).stem.replace("_", " "),),
    "folder name": lambda image, places: (places.label.replace("_", " "),),
}
