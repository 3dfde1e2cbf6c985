"""Routes for the images of a dataset: list them, draw them small, write a caption, take files.

They read inside the folders of datasets only; what they write is a caption beside an image, an uploaded file,
or a thumbnail in Graft's cache folder.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web
from comfy.cli_args import args
from torch import Tensor

from ...data.caption_edit import EDITABLE, write_caption
from ...data.catalog import Entry, list_entries, list_in_memory
from ...data.config import DatasetConfig
from ...data.hashes import ContentHashes
from ...data.image_file import BadImage
from ...data.samples import IN_MEMORY
from ...data.thumbnail import thumbnail, thumbnail_of
from ...data.upload import TAKEN
from ...user_error import UserError
from .. import paths
from .answers import guarded, in_thread, read_json
from .folders import folder_to_read, image_in, key_of, name_of, require_writable
from .in_graph import folder_and_config
from .in_memory import known_set
from .upload import take_file


def routes() -> list[web.RouteDef]:
    return [
        web.post("/graft/dataset", guarded(dataset)),
        web.get("/graft/dataset/thumbnail", guarded(draw)),
        web.post("/graft/dataset/caption", guarded(write)),
        web.post("/graft/dataset/upload", guarded(take_file)),
    ]


async def dataset(request: web.Request) -> web.Response:
    """Answer {images, editable, writable, why, message, largest, taken} for {prompt, node}.

    That is a graph in API form and its Load Dataset; or {set} is the word of a dataset that a graph made.
    """
    asked = await read_json(request)
    limits = {"largest": round(args.max_upload_size * 2**20), "taken": TAKEN}
    if "set" in asked:
        images = known_set(str(asked["set"]))
        if images is None:
            raise UserError("These images are no longer in memory; run the node again.")
        return web.json_response({**limits, "images": _rows(list_in_memory(images)), "editable": False})
    folder, config = folder_and_config(asked.get("prompt"), asked.get("node"))
    return web.json_response({**limits, **await in_thread(lambda: _listed(folder, config))})


def _listed(name: str, config: DatasetConfig) -> dict[str, Any]:
    answer: dict[str, Any] = {"folder": name, "images": [], "editable": True, "writable": True}
    try:
        folder = folder_to_read(name)
        with ContentHashes(paths.cache_folder()) as hashes:
            answer["images"] = _rows(list_entries(folder, config, hashes.of))
    except UserError as error:
        return {**answer, "message": str(error)}
    try:
        require_writable(folder)
    except UserError as error:
        answer |= {"editable": False, "writable": False, "why": str(error)}
    if config.caption.source not in EDITABLE:
        why = f"Captions come from {config.caption.source!r}, as set in Dataset Settings."
        answer |= {"editable": False, "why": why}
    return answer


def _rows(entries: list[Entry]) -> list[dict[str, Any]]:
    return [{**asdict(entry), "key": key_of(entry.name)} for entry in entries]


async def draw(request: web.Request) -> web.StreamResponse:
    """Answer the thumbnail of ?folder=<dataset>&key=<image>, or of ?set=<word>&key=<image>."""
    query = request.query
    key = query.get("key", "")
    if "set" in query:
        pixels = _in_memory(query["set"], name_of(key))
        drawn = await in_thread(lambda: thumbnail_of(pixels))
        return web.Response(body=drawn, headers=_HEADERS)

    def file() -> Path:
        return thumbnail(image_in(folder_to_read(query.get("folder", "")), key)[1], paths.cache_folder())

    try:
        return web.FileResponse(await in_thread(file), headers=_HEADERS)
    except BadImage:  # the list says why; an error would only fill the browser's console
        return web.Response(status=204)


def _in_memory(word: str, name: str) -> Tensor:
    """Return the pixels of an image of the graph. Raises UserError if it is gone."""
    images, index = known_set(word), name.removeprefix(IN_MEMORY)
    pixels = images.sources[0].pixels if images is not None else ()
    if re.fullmatch("[0-9]{1,9}", index) is None or int(index) >= len(pixels):
        raise UserError("no such image in memory; run the node again.")
    return pixels[int(index)]


_HEADERS = {
    "Content-Type": "image/jpeg",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, max-age=31536000, immutable",
}
"""Addresses hold the file's size and date, so that another file has another address."""


async def write(request: web.Request) -> web.Response:
    """Write the caption of {prompt, node, key, text, before}, and answer {caption}, as it is read again."""
    asked = await read_json(request)
    name, config = folder_and_config(asked.get("prompt"), asked.get("node"))
    text, before, key = (str(asked.get(part, "")) for part in ("text", "before", "key"))

    def written() -> dict[str, str]:
        folder = folder_to_read(name)
        require_writable(folder)
        image, _ = image_in(folder, key)
        return {"caption": write_caption(folder, image, text, before, config)}

    return web.json_response(await in_thread(written))
