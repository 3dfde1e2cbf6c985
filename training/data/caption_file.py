"""The caption of an image: from a text file beside it, a table, or its name.

The one rule: a caption that cannot be read is an error with a reason, never an empty caption.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from ..files.input_file import parse_json, require_ordinary
from ..user_error import UserError
from .config import CaptionConfig
from .image_file import BadImage

CAPTION_FILES = (".txt", ".caption", ".json")
METADATA = "metadata.jsonl"
NO_CAPTION = "'missing captions' to 'trigger' (the trigger word alone) or 'empty' (also for Caption Dataset)"
"""The alternative that an error about a missing caption offers."""
LARGEST = 1 << 20
"""Characters of a caption file or a line of metadata.jsonl; in .json files other fields count too."""
MOST_CAPTIONS = 1000
"""Most alternative captions of one image."""
_KEYS = ("caption", "captions", "text", "prompt", "tags")
"""Keys of a caption in JSON, in order of preference."""


@dataclass(frozen=True)
class Places:
    """Where to look for the captions of one folder's images."""

    folder: Path
    relative: str
    """Path of the folder inside the dataset, with forward slashes; "" for the dataset's own folder."""
    files: Mapping[str, str]
    """Caption files of the folder by name, with the extension in lower case."""
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
    """Return the captions of the file named `image`: () if it has none, several if they are alternatives.

    Raises BadImage for a caption that cannot be read.
    """
    for source in ("txt", "caption", "json", "jsonl") if config.source == "auto" else (config.source,):
        if captions := tuple(text.strip() for text in _SOURCES[source](image, places) if text.strip()):
            return captions
    return ()


def expected_file(image: str, config: CaptionConfig) -> str:
    """Return the name of the file that would hold this image's caption, for messages."""
    if config.source == "jsonl":
        return METADATA
    extension = config.source if config.source in ("caption", "json") else "txt"
    return f"{PurePosixPath(image).stem}.{extension}"


def read_metadata(path: Path, check: Callable[[], None]) -> dict[str, tuple[str, ...]]:
    """Return image name -> captions of a metadata.jsonl; each line is an object with "file_name" and a
    caption.

    `check` is called before each line and may raise to cancel. Raises BadImage naming the first bad line.
    """
    table = {}
    with _open_text(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LARGEST + 1), ""), 1):
            check()
            where = f"{path.name}, line {number}"
            if not _at_most(line, where).strip():
                continue
            try:
                entry = parse_json(line)
                name = entry["file_name"].replace("\\", "/")
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise BadImage(f'{where}: not {{"file_name": ..., "text": ...}} ({error})') from error
            table[name] = _captions_of(entry, where)
    return table


def _from_file(extension: str) -> Callable[[str, Places], tuple[str, ...]]:
    def find(image: str, places: Places) -> tuple[str, ...]:
        name = places.files.get(PurePosixPath(image).stem + extension)
        if name is None:
            return ()
        text = read_text(places.folder / name)
        if extension != ".json":
            return (text,)
        try:
            entry = parse_json(text) if text.strip() else ""
        except UserError as error:
            raise BadImage(f"{name} is not valid JSON ({error})") from error
        return _captions_of(entry, name)

    return find


def _captions_of(entry: Any, where: str) -> tuple[str, ...]:
    """Return the captions in a JSON value: a string, or an object with one of _KEYS.

    Tags are joined to one caption.
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
        if key != "tags" and len(value) > MOST_CAPTIONS:
            raise BadImage(
                f"{where}: {len(value)} captions for one image; at most {MOST_CAPTIONS} are allowed"
            )
        return (", ".join(value),) if key == "tags" else tuple(value)
    raise BadImage(f"{where}: {key!r} must be text or a list of texts")


def read_text(path: Path, what: str = "its caption") -> str:
    """Return the text of a file beside an image. Raises BadImage if it is too long or not readable."""
    with _open_text(path) as file:
        return _at_most(file.read(LARGEST + 1), f"{what} {path.name}")


def _at_most(text: str, what: str) -> str:
    """Return the text itself. Raises BadImage if it has more than LARGEST characters."""
    if len(text) > LARGEST:
        raise BadImage(f"{what} has more than {LARGEST} characters; shorten it")
    return text


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file: UTF-8, or UTF-16 if it starts with its byte order mark (Notepad's "Unicode").

    Errors while it is read become BadImage.
    """
    try:
        require_ordinary(path)
        with path.open("rb") as raw:
            utf16 = raw.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            raw.seek(0)
            yield TextIOWrapper(raw, "utf-16" if utf16 else "utf-8-sig", newline="")
    except OSError as error:
        raise BadImage(f"its caption {path.name} cannot be read ({error.strerror or error})") from error
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
