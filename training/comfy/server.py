"""Graft's routes on ComfyUI's server. They set one flag; they write no file and run no code."""

from __future__ import annotations

from aiohttp import web

from .session import request_finish
from .versions import running_server


def add_routes() -> None:
    """Add POST /graft/finish/{run} where a server is running: end that run after its current step, keeping
    its LoRA.
    """
    server = running_server()
    if server is not None:
        server.routes.post("/graft/finish/{run}")(finish)


async def finish(request: web.Request) -> web.Response:
    run = request.match_info["run"]
    if not request_finish(run):
        return web.json_response({"error": f"no run named {run!r} is under way"}, status=404)
    return web.json_response({"finishing": run})
