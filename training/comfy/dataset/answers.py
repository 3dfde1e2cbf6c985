"""How Graft's routes answer: to pages of this server only, and to errors with their reason."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from ...data.caption_edit import Conflict
from ...files.text import readable
from ...log import log
from ...user_error import UserError

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_threads = ThreadPoolExecutor(2, "graft-routes")
"""Few, as a run may be training beside them; not ComfyUI's own, so that its other routes need not wait."""


async def in_thread(compute: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_threads, compute)


def guarded(handler: Handler) -> Handler:
    """Return a handler that refuses other origins, and answers {error} for what a person can solve."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        if not is_same_origin(request):
            return refused("only pages of this ComfyUI may do that", 403)
        try:
            return await handler(request)
        except Conflict as error:
            return refused(str(error), 409)
        except UserError as error:
            return refused(str(error), 400)
        except OSError as error:
            if error.errno in _FULL:
                return refused("the disk is full; free some space and try again. Nothing was kept.", 507)
            if isinstance(error, ConnectionError):
                raise
            log.warning("%s: %s", request.path, error)
            return refused(f"the server cannot do that ({error.strerror or error})", 500)

    return answer


def is_same_origin(request: web.Request) -> bool:
    """Return whether a request comes from a page of this server, or from no page at all.

    Browsers say so in Sec-Fetch-Site, also behind a proxy. Where they don't, over plain HTTP, Origin counts.
    """
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("Origin")
    return origin is None or urlsplit(origin).netloc.lower() == request.headers.get("Host", "").lower()


def refused(reason: str, status: int) -> web.Response:
    return web.json_response({"error": readable(reason)}, status=status)


async def read_json(request: web.Request) -> Mapping[str, Any]:
    """Return the object that a page sent. A form of another site cannot have this type."""
    if request.content_type != "application/json":
        raise UserError("send JSON.")
    try:
        asked = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON ({type(error).__name__}).") from error
    if not isinstance(asked, dict):
        raise UserError("not a JSON object.")
    return asked
