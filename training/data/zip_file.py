"""Zip files from other people: unpacked within limits, never outside their folder, and only plain files."""

from __future__ import annotations

import re
import shutil
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ..files.text import shown
from ..user_error import UserError

MOST_FILES = 20_000
MOST_DIRECTORY = MOST_FILES * 256
"""Most bytes of a zip's directory; a file takes 46 and its name."""
_END, _END_SIZE = b"PK\5\6", 22
"""The last record of a zip, which may be followed by a comment (PKWARE's APPNOTE, 4.3.16)."""


def unpack(
    file: Path, into: Path, is_wanted: Callable[[str], bool], *, most_bytes: int
) -> tuple[list[tuple[str, Path]], list[str]]:
    """Return (name, unpacked file) of the wanted members of a zip, and the names of the others.

    Names have forward slashes, without a folder that all of them are in. Hidden files are neither. Raises
    UserError for a zip that is damaged, has a password or more than MOST_FILES files, unpacks to more than
    `most_bytes`, or holds a link or a name that leads out of its folder; OSError if the disk is full.
    """
    into.mkdir()
    try:
        _require_small_directory(file)
        with zipfile.ZipFile(file) as archive:
            members = list(_members(archive))
            wanted = [(name, info) for name, info in members if is_wanted(name)]
            _require_limits(wanted, most_bytes)
            unpacked = []
            for index, (name, info) in enumerate(wanted):
                target = into / str(index)
                with archive.open(info) as source, target.open("wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
                unpacked.append((name, target))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeError) as error:
        raise UserError(f"is no zip file, or a damaged one ({error}); make it again") from error
    top = _common_folder([name for name, _ in unpacked])
    others = [name for name, _ in members if not is_wanted(name)]
    return [(name.removeprefix(top), path) for name, path in unpacked], others


def _members(archive: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yield (name, member) of all that are neither folders nor hidden, checking every one."""
    seen = set()
    for info in archive.infolist():
        name = _name(info)
        parts = PurePosixPath(name).parts
        if ".." in parts or name.startswith("/") or re.match("[A-Za-z]:", name):
            raise UserError(f"holds {shown(name)}, which leads out of its folder; nothing was unpacked")
        if (kind := stat.S_IFMT(info.external_attr >> 16)) and not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise UserError(
                f"holds {shown(name)}, which is a link or a device; put the file itself into the zip"
            )
        if info.is_dir() or "__MACOSX" in parts or any(part.startswith(".") for part in parts):
            continue
        if info.flag_bits & 1:
            raise UserError("has a password; make it again without one")
        if name in seen:
            raise UserError(f"holds {shown(name)} twice; make it again")
        seen.add(name)
        yield name, info


def _name(info: zipfile.ZipInfo) -> str:
    """Return a member's name: UTF-8 where it is valid, whether or not the zip says that it is."""
    name = info.filename
    if not info.flag_bits & 0x800:
        try:
            name = name.encode("cp437").decode("utf-8")
        except UnicodeError:  # of another encoding: readable letters, if not the right ones
            pass
    return name.replace("\\", "/")


def _require_limits(members: list[tuple[str, zipfile.ZipInfo]], most_bytes: int) -> None:
    if len(members) > MOST_FILES:
        raise UserError(f"holds {len(members)} files; {MOST_FILES} are the most, so split it")
    if (size := sum(info.file_size for _, info in members)) > most_bytes:
        raise UserError(
            f"unpacks to {size / 1e6:.0f} MB; {most_bytes / 1e6:.0f} MB are the most, so split it"
        )


def _require_small_directory(file: Path) -> None:
    """Raise UserError for a zip of too many files before its directory is read: a million take a gigabyte."""
    with file.open("rb") as opened:
        end = _end_of(opened)
    size = int.from_bytes(end[12:16], "little")
    if size > MOST_DIRECTORY or int.from_bytes(end[10:12], "little") == 0xFFFF:
        raise UserError(f"holds too many files; {MOST_FILES} are the most, so split it")


def _end_of(file: BinaryIO) -> bytes:
    """Return the end record of a zip. Raises BadZipFile without one."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _END_SIZE - 0xFFFF))
    tail = file.read()
    place = tail.rfind(_END)
    if place < 0 or len(tail) < place + _END_SIZE:
        raise zipfile.BadZipFile("its end is missing")
    return tail[place:]


def _common_folder(names: list[str]) -> str:
    """Return the folder that all names are in, with its slash: "" without one, or if it counts repeats."""
    tops = {name.partition("/")[0] if "/" in name else "" for name in names}
    top = tops.pop() if len(tops) == 1 else ""
    return f"{top}/" if top and not re.match(r"\d{1,3}_", top) else ""
