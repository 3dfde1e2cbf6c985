"""Questions to Graft's routes on a server of their own."""

from __future__ import annotations

import asyncio

import yarl
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from graft.training.comfy.run import routes


def ask(*questions, method="get", at_once=False, **body):
    """Return (status, body) of each question to the routes, asked one after the other or all `at_once`."""

    async def asking():
        app = web.Application()
        app.add_routes(routes.routes())
        async with TestClient(TestServer(app)) as client:
            asked = [_answer(client, method, question, **body) for question in questions]
            return await asyncio.gather(*asked) if at_once else [await each for each in asked]

    return asyncio.run(asking())


async def _answer(client, method, question, **body):
    async with client.request(method, yarl.URL(question, encoded=True), **body) as answer:
        return answer.status, await answer.read()
