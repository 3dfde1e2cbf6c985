"""Graft's routes on ComfyUI's server: those for the chart on Train Steps, beside those for datasets.

They read logs and samples of runs under output/graft, and one of them sets the Finish flag. They write no
file, run no code, and answer 404 for anything that is not part of a run.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from ...log import log as logger
from ...run.queued import settings_of
from ...run.run_log import read_entries
from .. import paths
from ..dataset.routes import routes as dataset_routes
from ..versions import running_server
from .chart_run import added_inputs, chart_runs
from .session import known_runs, request_finish

SAMPLE = re.compile(r"step-(\d{8,20})-(\d{1,6})\.(png|webp)", re.ASCII)
CHECKPOINT = re.compile(r"step-(\d{8,20})", re.ASCII)


def add_routes() -> None:
    """Add the routes if a server is running, once."""
    server = running_server()
    if server is None:
        return
    for route in server.routes:
        if getattr(route, "path", "") == "/graft/runs":
            other = Path(inspect.getfile(route.handler)).resolve()
            if other != Path(__file__).resolve():
                logger.error(
                    "installed twice, in %s and in %s. The nodes of one do not work with the chart and "
                    "Finish of the other: remove one of these folders and restart ComfyUI.",
                    *(_installation(file) for file in (other, Path(__file__).resolve())),
                )
            return
    for route in routes():
        server.routes.route(route.method, route.path)(route.handler)


def _installation(file: Path) -> Path:
    """Return the folder of the Graft that a module belongs to, of this version or another."""
    return next((folder.parent for folder in file.parents if folder.name == "training"), file.parent)


def routes() -> list[web.RouteDef]:
    return [
        web.get("/graft/runs", runs),
        web.post("/graft/runs", shown),
        web.get("/graft/log", log),
        web.get("/graft/files", files),
        web.get("/graft/sample", sample),
        web.post("/graft/finish/{run:.+}", finish),
        *dataset_routes(),
    ]


async def runs(request: web.Request) -> web.Response:
    """Answer {runs}: the runs that this server has trained or is training, the latest last."""
    return web.json_response({"runs": known_runs()})


async def shown(request: web.Request) -> web.Response:
    """Answer {runs, settings} for {workflow, prompt}, a graph in API form.

    Both are keyed by node id: the run that a Train Steps shows, and a digest of each node's settings.
    """
    try:
        asked = await request.json()
        graph, workflow = asked["prompt"], asked.get("workflow")
        answer = await _in_thread(
            lambda: {"runs": chart_runs(graph, workflow), "settings": settings_of(graph, added_inputs)}
        )
    except (ValueError, TypeError, LookupError, RecursionError):
        return _refused("not a graph in API form", 400)
    return web.json_response(answer)


async def log(request: web.Request) -> web.Response:
    """Answer {start, next, more, entries} for ?run=<run>&start=<byte>: the steps logged from that byte on.

    `start` comes back as 0 if the log has become shorter: it was begun again.
    """
    path = _run_folder(request) / "log.jsonl"
    start = request.query.get("start", "0")
    if not re.fullmatch(r"[0-9]{1,18}", start):
        return _refused("start must be a number of bytes, 0 or more", 400)
    return web.json_response(await _in_thread(lambda: read_entries(path, int(start))))


async def files(request: web.Request) -> web.Response:
    """Answer {samples: [{name, step, number}], checkpoints: [step]} for ?run=<run>, by step."""
    folder = _run_folder(request)
    return web.json_response(await _in_thread(lambda: list_files(folder)))


async def sample(request: web.Request) -> web.StreamResponse:
    """Answer the image ?run=<run>&name=step-<n>-<prompt>.png, or the animated one of a clip, .webp."""
    folder, name = _run_folder(request), request.query.get("name", "")
    path = folder / "samples" / name
    match = SAMPLE.fullmatch(name)
    if not match or not _is_file_of(folder, path):
        return _refused("no such sample", 404)
    headers = {"Content-Type": f"image/{match[3]}", "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(path, headers=headers)


async def finish(request: web.Request) -> web.Response:
    """End the run after its current step; it keeps its LoRA."""
    run = request.match_info["run"]
    if not request_finish(run):
        return _refused("no such run is under way", 404)
    return web.json_response({"finishing": run})


def list_files(folder: Path) -> dict[str, Any]:
    """Return a run's samples and the steps of its checkpoints."""
    samples = [
        {"name": match[0], "step": int(match[1]), "number": int(match[2])}
        for name in _names(folder / "samples")
        if (match := SAMPLE.fullmatch(name)) and _is_file_of(folder, folder / "samples" / name)
    ]
    checkpoints = (CHECKPOINT.fullmatch(name) for name in _names(folder / "checkpoints"))
    return {
        "samples": sorted(samples, key=lambda row: (row["step"], row["number"])),
        "checkpoints": sorted(int(match[1]) for match in checkpoints if match),
    }


def _run_folder(request: web.Request) -> Path:
    """Return the folder of ?run=<run>. Raises HTTPNotFound unless it is a run under output/graft.

    A run that this server has begun has no log until its first step.
    """
    root, run = paths.graft_folder(), request.query.get("run", "")
    try:
        folder = paths.existing_run(run)
        file, begun = folder / "log.jsonl", run in (live["run"] for live in known_runs())
        if _is_file_of(root, file) or (begun and not os.path.lexists(file)):
            return folder
    except (OSError, ValueError, RuntimeError):  # no usable name; a loop of links
        pass
    raise web.HTTPNotFound(text=json.dumps({"error": "no such run"}), content_type="application/json")


def _is_file_of(folder: Path, path: Path) -> bool:
    """Return whether `path` is a regular file in `folder`, also after following links."""
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []


def _refused(reason: str, status: int) -> web.Response:
    return web.json_response({"error": reason}, status=status)


async def _in_thread(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return await asyncio.get_running_loop().run_in_executor(None, compute)
