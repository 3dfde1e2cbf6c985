"""Graft's routes on ComfyUI's server: those for the chart on Train Steps, beside those for runs and datasets.

They read logs and samples of runs under output/graft, and one of them sets the Finish flag. They write no
file but thumbnails in the cache, run no code, and answer 404 for anything that is not part of a run.
"""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from ...data.image_file import BadImage
from ...data.thumbnail import thumbnail
from ...log import log as logger
from ...run.queued import nodes_of, settings_of
from ...run.run_files import INPUT, SAMPLE, is_file_of, list_files
from ...run.run_log import read_entries
from .. import paths
from ..dataset.answers import guarded, in_thread, refused
from ..dataset.routes import routes as dataset_routes
from ..versions import running_server
from .before_run import look_ahead_all
from .chart_run import added_inputs, chart_runs
from .list_routes import routes as list_routes
from .list_routes import run_folder
from .session import known_runs, request_finish

TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "flac": "audio/flac"}


def add_routes() -> None:
    """Add the routes if a server is running, once."""
    server = running_server()
    if server is None:
        return
    for route in server.routes:
        if getattr(route, "path", "") == "/graft/runs":
            other = Path(inspect.getfile(inspect.unwrap(route.handler))).resolve()
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
        web.get("/graft/runs", guarded(runs)),
        web.post("/graft/runs", guarded(shown)),
        web.post("/graft/before", guarded(before)),
        web.get("/graft/log", guarded(log)),
        web.get("/graft/files", guarded(files)),
        web.get("/graft/sample", guarded(sample)),
        web.post("/graft/finish/{run:.+}", guarded(finish)),
        *list_routes(),
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
        answer = await in_thread(
            lambda: {"runs": chart_runs(graph, workflow), "settings": settings_of(graph, added_inputs)}
        )
    except (ValueError, TypeError, LookupError, RecursionError):
        return refused("not a graph in API form", 400)
    return web.json_response(answer)


async def before(request: web.Request) -> web.Response:
    """Answer {node id: {lines, warnings}} for {prompt}, a graph in API form: what each Train Steps says
    before Run. It answers {} while a run is under way, whose steps it would slow down.
    """
    try:
        graph = nodes_of((await request.json())["prompt"])
        if any(live["running"] for live in known_runs()):
            return web.json_response({})
        return web.json_response(await in_thread(lambda: look_ahead_all(graph)))
    except (ValueError, TypeError, LookupError, RecursionError):
        return refused("not a graph in API form", 400)


async def log(request: web.Request) -> web.Response:
    """Answer {start, next, more, entries} for ?run=<run>&start=<byte>: the steps logged from that byte on.

    `start` comes back as 0 if the log has become shorter: it was begun again.
    """
    path = run_folder(request) / "log.jsonl"
    start = request.query.get("start", "0")
    if not re.fullmatch(r"[0-9]{1,18}", start):
        return refused("start must be a number of bytes, 0 or more", 400)
    return web.json_response(await in_thread(lambda: read_entries(path, int(start))))


async def files(request: web.Request) -> web.Response:
    """Answer {samples: [{name, step, number}], inputs: [{name, number}], checkpoints: [step]} for ?run=<run>,
    by step. `number` is that of the prompt.
    """
    folder = run_folder(request)
    return web.json_response(await in_thread(lambda: list_files(folder)))


async def sample(request: web.Request) -> web.StreamResponse:
    """Answer the sample ?run=<run>&name=step-<n>-<prompt>.png; .webp of a clip, .flac of a sound, or
    input-<prompt>.png, what it was made from.

    With &small=1, the thumbnail of an image.
    """
    folder, name = run_folder(request), request.query.get("name", "")
    path = folder / "samples" / name
    match = SAMPLE.fullmatch(name) or INPUT.fullmatch(name)
    if not match or not is_file_of(folder, path):
        return refused("no such sample", 404)
    kind = match[match.lastindex or 0]
    if request.query.get("small") == "1":
        with suppress(BadImage, OSError):  # then the image itself
            path, kind = await in_thread(lambda: thumbnail(path, paths.cache_folder())), "jpeg"
    headers = {"Content-Type": TYPES[kind], "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(path, headers=headers)


async def finish(request: web.Request) -> web.Response:
    """End the run after its current step; it keeps its LoRA."""
    run = request.match_info["run"]
    if not request_finish(run):
        return refused("no such run is under way", 404)
    return web.json_response({"finishing": run})
