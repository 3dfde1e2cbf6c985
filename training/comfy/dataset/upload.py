"""The route that takes files for a dataset: they arrive in a hidden folder, and move when they are whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import BinaryIO

from aiohttp import web
from comfy.cli_args import args

from ...data.upload import take_upload
from ...files.leftovers import is_left_over, owned
from ...files.text import shown
from ...user_error import UserError
from .. import paths
from .answers import in_thread, refused
from .folders import folder_to_write

ARRIVING = ".graft-upload-"
"""Prefix of folders with files that are not whole yet; datasets don't show hidden folders."""
CHUNK = 1 << 20
SPARE = 64 << 20
"""Bytes that stay free on the disk."""


async def take_file(request: web.Request) -> web.Response:
    """Take the body as the file ?folder=<dataset>&name=<path inside it>&replace=<1: also if it is there>.

    Answer {folder, saved, same, exists, refused, others}. A zip is unpacked.
    """
    name = request.query.get("name", "")
    if request.content_type != "application/octet-stream":
        raise UserError("send the file as application/octet-stream.")
    largest = round(args.max_upload_size * 2**20)
    if (request.content_length or 0) > largest:
        return _too_large(name, largest)
    folder = await in_thread(lambda: folder_to_write(request.query.get("folder", "")))
    root = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    if shutil.disk_usage(root).free < (request.content_length or 0) + SPARE:
        return refused(f"the disk has no room for {shown(name)}; free some space and try again.", 507)
    with _arriving(root) as place:
        file = place / "file"
        if not await _receive_body(request, file, largest):
            return _too_large(name, largest)
        received = await in_thread(
            partial(
                take_upload,
                file,
                name,
                partial(paths.in_dataset, folder),
                replace=request.query.get("replace") == "1",
                most_bytes=largest,
            )
        )
    return web.json_response({"folder": request.query.get("folder", ""), **asdict(received)})


async def _receive_body(request: web.Request, file: Path, largest: int) -> bool:
    """Write a request's body to a file; return False as soon as it is larger than allowed."""
    size = 0
    with file.open("wb") as opened:
        async for chunk in request.content.iter_chunked(CHUNK):
            size += len(chunk)
            if size > largest:
                return False
            await in_thread(partial(_write, opened, chunk))
    return True


def _write(file: BinaryIO, chunk: bytes) -> None:
    file.write(chunk)


@contextmanager
def _arriving(root: Path) -> Iterator[Path]:
    """Yield a hidden folder in `root` that is gone afterwards; those of killed servers are removed first."""
    for folder in root.glob(f"{ARRIVING}*"):
        if is_left_over(folder.name, ARRIVING):
            shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=owned(ARRIVING), dir=root, ignore_cleanup_errors=True) as made:
        yield Path(made)


def _too_large(name: str, largest: int) -> web.Response:
    return refused(
        f"{shown(name)} is too large: {largest / 2**20:.0f} MB are the most that this ComfyUI takes "
        "(--max-upload-size).",
        413,
    )
