"""Folders of images and captions with something in them that is damaged, huge or not a file at all.

A sound image, a.png, lies in each of them, with a caption unless the case brings its own.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .bad_files import BROKEN_NAME, Runs, bind

Add = Callable[[Path], Any]
DEEP = 100_000
MB = 1 << 20


@dataclass(frozen=True)
class Extra:
    """What a case puts beside the sound image."""

    add: Add
    named: str = ""
    """What an error has to name; "": nothing."""
    refused: bool | None = True
    """None: it may be refused or work, as long as Cancel does."""
    caption: bool = True
    """Whether the sound image has a caption besides."""


def write(**files: bytes | str) -> Add:
    """Return what writes files; in a name, two underscores are a dot and the others minus signs."""

    def add(folder: Path) -> None:
        for name, content in files.items():
            path = folder / name.replace("__", ".").replace("_", "-")
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return add


def named(name: str, content: bytes) -> Add:
    return lambda folder: (folder / name).write_bytes(content)


def caption(content: bytes | str, suffix: str = "txt", **options: Any) -> Extra:
    """Return a case whose sound image has this caption file."""
    options = {"refused": None, "named": "a.", **options}  # the image or its caption
    return Extra(write(**{f"a__{suffix}": content}), caption=False, **options)


def image(content: bytes, name: str = "b.png", *, refused: bool | None = True) -> Extra:
    """Return a case with a second image, and its caption."""

    def add(folder: Path) -> None:
        (folder / name).write_bytes(content)
        (folder / name).with_suffix(".txt").write_text("b")

    return Extra(add, named=name, refused=refused)


def special(name: str, kind: Callable[[Path], Any], *, refused: bool | None = True) -> Extra:
    """Return a case in which `kind` makes something that is no ordinary file; it may be the caption's."""
    own = name in ("a.txt", "a.caption", "a.json", "metadata.jsonl")
    return Extra(lambda folder: kind(folder / name), named=name, refused=refused, caption=not own)


def drawn(mode: str = "RGB", size: tuple[int, int] = (64, 64), format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, format, **options)
    return file.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG whose header says this size, whatever its pixels are."""
    every = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), *chunks]
    every += [(b"IDAT", zlib.compress(bytes(64 * 193))), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in every
    )
    return b"\x89PNG\r\n\x1a\n" + body


def npz(**arrays: bytes | Any) -> bytes:
    """Return a file of arrays; bytes are taken for a whole .npy."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            if not isinstance(array, bytes):
                np.save(member, array, allow_pickle=True)
            archive.writestr(f"{name}.npy", array if isinstance(array, bytes) else member.getvalue())
    return file.getvalue()


def npy(header: str) -> bytes:
    """Return a .npy with this header and no numbers."""
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header.encode()


def latents(**changes: Any) -> Extra:
    """Return a case with cached latents, sound but for `changes`."""
    sound = {"latents": np.zeros((16, 8, 8), np.float32), "original_size": np.array([64, 64])}
    content = {name: value for name, value in {**sound, **changes}.items() if value is not None}
    return image(npz(**content), "b.npz")


def deep_folders(folder: Path) -> None:
    here = os.open(folder, os.O_RDONLY)
    for _ in range(30):  # longer than a path may be
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


FIFO, LOOP, NOWHERE, ZERO = (
    os.mkfifo if hasattr(os, "mkfifo") else Path.touch,
    lambda path: path.symlink_to(path.name),
    lambda path: path.symlink_to("nowhere"),
    lambda path: path.symlink_to("/dev/zero"),
)
FLOAT = "{{'descr': '<f4', 'fortran_order': False, 'shape': {}, }}\n"

SPECIAL: Mapping[str, Extra] = {
    f"{what} as {name}": special(name, kind)
    for what, kind, names in (
        ("pipe", FIFO, ("a.txt", "a.caption", "a.json", "metadata.jsonl", "a-mask.png", "b.png", "b.npz")),
        ("socket", bind, ("a.txt", "a.json", "metadata.jsonl", "a-mask.png", "b.png", "b.npz")),
        ("link to itself", LOOP, ("a.txt", "metadata.jsonl", "b.png", "b.npz")),
        ("link to nothing", NOWHERE, ("a.txt", "b.png")),
        ("link to /dev/zero", ZERO, ("a.txt", "a-mask.png", "b.png", "b.npz")),
        ("folder", Path.mkdir, ("a.txt",)),
    )
    for name in names
}
NAMES: Mapping[str, Extra] = {
    "name that is no UTF-8, without a caption": Extra(named(f"{BROKEN_NAME}.png", drawn()), BROKEN_NAME),
    "name that is no UTF-8, with a caption": image(drawn(), f"{BROKEN_NAME}.png", refused=None),
    "name that is no UTF-8, damaged": image(b"no picture", f"{BROKEN_NAME}.png"),
    "caption's name is no UTF-8": Extra(named(f"{BROKEN_NAME}.txt", b"b"), refused=False),
    "folder whose name is no UTF-8": Extra(lambda f: (f / BROKEN_NAME).mkdir(), refused=False),
    "name with a line break, damaged": image(b"no picture", "b\n[ERROR].png"),
    "name with colors, damaged": image(b"no picture", "\x1b[31mb.png"),
    "name of 255 bytes": image(drawn(), "b" * 251 + ".png", refused=None),
    "name that is a format": image(b"no picture", "%s{0}.png"),
    "name right to left": image(b"no picture", "\u202ebad.png"),
    "name of a trigger": image(b"no picture", "[trigger].png"),
    "name of a drive": image(b"no picture", "C:\\x.png"),
    "only dots": image(b"no picture", "a..png"),
}
CAPTIONS: Mapping[str, Extra] = {
    "10 MB of words": caption("word " * (2 * MB)),
    "one word of 10 MB": caption("w" * (10 * MB)),
    "10 MB without a space, not Latin": caption("\u732b" * (3 * MB)),
    "1 MB of brackets": caption("(" * MB),
    "1 MB of closed brackets": caption("(" * (MB // 2) + ")" * (MB // 2)),
    "1 MB of triggers": caption("[trigger] " * (MB // 10)),
    "1 MB of tags": caption("a, " * (MB // 3)),
    "1 MB of BREAK": caption("BREAK " * (MB // 6)),
    "1 MB of weights": caption("(a:1.1) " * (MB // 8)),
    "100,000 lines": caption("line\n" * 100_000),
    "weight of NaN": caption("(a:nan), (b:inf), (c:1e400), (d:-1e308)"),
    "embedding that leads out": caption("embedding:../../outside/x, embedding:/etc/passwd"),
    "embedding of no UTF-8": caption("embedding:\udce9".encode("utf-8", "surrogatepass"), refused=True),
    "zeros": caption(bytes(1000)),
    "Latin-1": caption(b"caf\xe9", refused=True),
    "half of UTF-16": caption(b"\xff\xfea\0b", refused=True),
    "JSON of a number": caption("1", "json"),
    "JSON cut off": caption('{"caption": "a', "json", refused=True),
    "JSON 100,000 deep": caption("[" * DEEP, "json", refused=True),
    "JSON with half of a letter": caption('{"caption": "\\ud800"}', "json", named="a.png", refused=True),
    "JSON with a number of 9,999 digits": caption('{"caption": ' + "9" * 9999 + "}", "json", refused=True),
    "JSON of NaN": caption('{"caption": NaN}', "json"),
    "JSON of nulls": caption('{"caption": [null, null]}', "json", refused=True),
    "JSON of 100,000 captions": caption(json.dumps({"captions": ["a"] * 100_000}), "json"),
    "table 100,000 deep": Extra(write(metadata__jsonl="[" * DEEP), "metadata.jsonl", caption=False),
    "table of numbers": Extra(write(metadata__jsonl="1\n2\n"), "metadata.jsonl", caption=False),
    "table whose name is a list": Extra(
        write(metadata__jsonl='{"file_name": ["a.png"], "text": "a"}'), refused=None
    ),
    "table with half of a letter": Extra(
        write(metadata__jsonl='{"file_name": "\\ud800", "text": "\\ud800"}'), refused=None
    ),
    "table that leads out": Extra(
        write(metadata__jsonl='{"file_name": "../../outside/red.png", "text": "a"}'), refused=None
    ),
    "table of 200,000 lines": Extra(
        write(metadata__jsonl='{"file_name": "x.png", "text": "a"}\n' * 200_000), refused=None
    ),
    "table of one line of 20 MB": Extra(
        write(metadata__jsonl='{"file_name": "' + "x" * (20 * MB)), "metadata.jsonl"
    ),
}  # fmt: skip
PICTURES: Mapping[str, Extra] = {
    "no bytes": image(b""),
    "text": image(b"no picture"),
    "cut off": image(drawn(size=(512, 512), mode="L")[:-40]),
    "one byte wrong": image(drawn()[:50] + b"\xff" + drawn()[51:]),
    "size of 60,000 x 60,000": image(png(60_000, 60_000)),
    "size of 2^31": image(png(2**31 - 1, 2**31 - 1)),
    "size of nothing": image(png(0, 64)),
    "size that its pixels have not": image(png(512, 512)),
    "text of 100 MB in it": image(
        png(64, 64, (b"zTXt", b"a\0\0" + zlib.compress(bytes(100 * MB)))), refused=None
    ),
    "color profile of noise": image(
        png(64, 64, (b"iCCP", b"a\0\0" + zlib.compress(b"noise" * 99))), refused=None
    ),
    "one pixel": image(drawn(size=(1, 1)), refused=None),
    "1 x 20,000": image(drawn(size=(1, 20_000)), refused=None),
    "16 bits": image(drawn("I;16"), refused=None),
    "CMYK": image(drawn("CMYK", format="JPEG"), "b.jpg", refused=None),
    "JPEG cut off": image(drawn(format="JPEG")[:-200], "b.jpg"),
    "EXIF of noise": image(
        drawn(format="JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"), "b.jpg", refused=None
    ),
    "GIF cut off": image(drawn("P", format="GIF")[:-10], "b.gif", refused=None),
    "WebP cut off": image(drawn(format="WEBP")[:-20], "b.webp"),
    "TIFF that leads nowhere": image(b"II*\0\xff\xff\xff\x7f", "b.tif"),
    "BMP of 2 GB": image(b"BM\xff\xff\xff\x7f" + bytes(50), "b.bmp"),
    "SVG": image(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "b.png"),
    "HEIC": image(b"\0\0\0\x18ftypheic" + bytes(100), "b.png"),
    "mask of another size": Extra(named("a-mask.png", drawn("L", (7, 9))), refused=None),
    "mask cut off": Extra(named("a-mask.png", drawn("L", (512, 512))[:-40]), "a-mask.png"),
    "mask of 60,000 x 60,000": Extra(named("a-mask.png", png(60_000, 60_000)), "a-mask.png"),
    "twice under one name": Extra(named("a.jpg", drawn(format="JPEG")), "a.jpg"),
    "no pictures": Extra(empty, refused=True),
    "folders deeper than a path may be": Extra(deep_folders, refused=None),
    "link to its own folder": Extra(lambda f: (f / "again").symlink_to(f), refused=None),
    "folder of 0 repeats": Extra(lambda f: (f / "0_x").mkdir(), refused=None),
}  # fmt: skip
LATENTS: Mapping[str, Extra] = {
    "no zip": image(b"no zip", "b.npz"),
    "cut off": image(npz(latents=np.zeros((16, 8, 8), np.float32))[:-30], "b.npz"),
    "NaN": latents(latents=np.full((16, 8, 8), np.nan, np.float32)),
    "infinity": latents(latents=np.full((16, 8, 8), np.inf, np.float32)),
    "objects": latents(latents=np.array([Runs("was-run")] * 3, object)),
    "text": latents(latents=np.array(["a"])),
    "of another model": latents(latents=np.zeros((4, 8, 8), np.float32)),
    "without numbers": latents(latents=np.zeros((16, 0, 0), np.float32)),
    "size below 0": latents(original_size=np.array([-64, 64])),
    "size of NaN": latents(original_size=np.array([np.nan, 64])),
    "size of 2^60": latents(original_size=np.array([1 << 60, 1 << 60])),
    "no size": latents(original_size=None),
    "header of 2^40 numbers": latents(latents=npy(FLOAT.format("(1048576, 1024, 1024)"))),
    "header of negative numbers": latents(latents=npy(FLOAT.format("(-16, 8, 8)"))),
    "header of deep brackets": latents(latents=npy("(" * 5000)),
    "header that is code": latents(latents=npy("__import__('os').mkdir('was-run')")),
    "30 MB of zeros in 30 kB": replace(latents(extra=np.zeros(30 * MB, np.uint8)), refused=None),
}
DATASETS: Mapping[str, Extra] = {
    f"{kind}: {name}": extra
    for kind, table in (
        ("file", SPECIAL),
        ("name", NAMES),
        ("caption", CAPTIONS),
        ("picture", PICTURES),
        ("latents", LATENTS),
    )
    for name, extra in table.items()
}


def make(name: str, folder: Path) -> None:
    """Write a case's folder."""
    extra = DATASETS[name]
    (folder / "a.png").write_bytes(drawn())
    if extra.caption:
        (folder / "a.txt").write_text("a")
    extra.add(folder)
