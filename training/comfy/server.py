"""Graft's routes on ComfyUI's server. They set one flag; they write no file and run no code."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from .session import request_finish


def add_routes() -> None:
    """Add POST /graft/finish/{run} where a server is running: end that run after its current step, keeping its LoRA."""
    from server import PromptServer  # absent where nodes are used without a server

    server: Any = getattr(PromptServer, "instance", None)
    if server is not None:
        server.routes.post("/graft/finish/{run}")(finish)


async def finish(request: web.Request) -> web.Response:
    run = request.match_info["run"]
    if not request_finish(run):
        return web.json_response({"error": f"no run named {run!r} is under way"}, status=404)
    return web.json_response({"finishing": run})
