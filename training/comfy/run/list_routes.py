"""Routes for the list of runs: every run in output/graft, its settings and graph, and what is done with one.

They delete a run, write its LoRA into output/loras, and ask one under way to draw or save; nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from ...run.delete_run import delete_run
from ...run.folder import Run
from ...run.new_run_notes import read_settings
from ...run.run_files import is_file_of
from ...run.run_list import list_runs
from ...user_error import UserError
from .. import paths
from ..dataset.answers import guarded, in_thread, read_json
from ..files.run_lora import copy_lora
from .run_graph import read_graph
from .session import known_runs, request_now


def routes() -> list[web.RouteDef]:
    return [
        web.get("/graft/runs/all", guarded(every_run)),
        web.get("/graft/runs/settings", guarded(settings)),
        web.get("/graft/runs/graph", guarded(graph)),
        web.post("/graft/runs/delete", guarded(delete)),
        web.post("/graft/runs/lora", guarded(use_lora)),
        web.post("/graft/runs/now", guarded(ask_now)),
    ]


async def every_run(request: web.Request) -> web.Response:
    """Answer {runs}: all that this ComfyUI has kept, the latest first; "live" is what is known of one under
    way. Requests that come while a list is made get the same one.
    """
    global _listing
    if _listing is None or _listing.done():
        _listing = asyncio.ensure_future(in_thread(_rows))
    rows = await asyncio.shield(_listing)
    live = {run["run"]: run for run in known_runs() if run["running"]}
    return web.json_response({"runs": [{**row, "live": live.get(row["run"])} for row in rows]})


_listing: asyncio.Future[list[dict[str, Any]]] | None = None
"""The list that is being made, or was made last."""


def _rows() -> list[dict[str, Any]]:
    return [asdict(row) for row in list_runs(paths.graft_folder())]


async def settings(request: web.Request) -> web.Response:
    """Answer the settings that decide the result of ?run=<run>, flat."""
    folder = run_folder(request)
    return web.json_response(await in_thread(lambda: read_settings(Run(folder))))


async def graph(request: web.Request) -> web.Response:
    """Answer {node, prompt, workflow, how, steps}: a graph that continues ?run=<run>."""
    folder, run = run_folder(request), request.query["run"]
    return web.json_response(await in_thread(lambda: read_graph(folder, run)))


async def delete(request: web.Request) -> web.Response:
    """Delete {run}, and answer {freed: bytes}."""
    run = await _asked_run(request)
    if any(live["run"] == run and live["running"] for live in known_runs()):
        raise UserError(f"{run} is being trained; Finish or Cancel it first.")
    return web.json_response({"freed": await in_thread(lambda: delete_run(paths.graft_folder(), run))})


async def use_lora(request: web.Request) -> web.Response:
    """Write the newest LoRA of {run} where Load LoRA lists it, and answer {name}, its name there."""
    folder = existing_run(await _asked_run(request))
    return web.json_response({"name": await in_thread(lambda: copy_lora(Run(folder)))})


async def ask_now(request: web.Request) -> web.Response:
    """Ask {run}, which is under way, to "draw" or "save", as {what} says."""
    asked = await read_json(request)
    request_now(str(asked.get("run", "")), str(asked.get("what", "")))
    return web.json_response({})


async def _asked_run(request: web.Request) -> str:
    run = (await read_json(request)).get("run")
    if not isinstance(run, str):
        raise UserError("say which run.")
    return run


def run_folder(request: web.Request) -> Path:
    """Return the folder of ?run=<run>. Raises HTTPNotFound unless it is a run under output/graft."""
    return existing_run(request.query.get("run", ""))


def existing_run(run: str) -> Path:
    """Return the folder of a run under output/graft. Raises HTTPNotFound if it is none.

    A run that this server has begun has no log until its first step.
    """
    root = paths.graft_folder()
    try:
        folder = paths.existing_run(run)
        file, begun = folder / "log.jsonl", run in (live["run"] for live in known_runs())
        if is_file_of(root, file) or (begun and not os.path.lexists(file)):
            return folder
    except (OSError, ValueError, RuntimeError):  # no usable name; a loop of links
        pass
    raise web.HTTPNotFound(text=json.dumps({"error": "no such run"}), content_type="application/json")
