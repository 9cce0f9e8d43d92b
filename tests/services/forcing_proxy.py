"""A server between an agent and the engine that makes a random model do what the agent's test needs.

It changes the JSON bodies of requests and passes everything else on, byte for byte. What it was asked is written down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

Json = dict[str, Any]
Change = Callable[[str, Json], Json]
"""Path and body of a request to the body that the engine gets."""


@dataclass
class ForcingProxy:
    url: str = ""
    requests: list[tuple[str, Json]] = field(default_factory=list)
    """Path and body as the agent sent them."""
    answers: list[bytes] = field(default_factory=list)


def exactly(**values: object) -> Json:
    """The schema of one object and no other."""
    properties = {name: {"const": value} for name, value in values.items()}
    return {"type": "object", "properties": properties, "required": list(values), "additionalProperties": False}


@contextlib.contextmanager
def forcing_proxy(engine_url: str, change: Change) -> Iterator[ForcingProxy]:
    proxy = ForcingProxy()
    ready, loop = threading.Event(), asyncio.new_event_loop()
    done = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if data:
            body = json.loads(data)
            proxy.requests.append((request.path, body))
            data = json.dumps(change(request.path, json.loads(data))).encode()
        names = ("authorization", "content-type", "anthropic-version", "accept")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
            session.request(request.method, engine_url + request.path_qs, data=data or None, headers=headers) as told,
        ):
            response = web.StreamResponse(status=told.status, headers={"content-type": told.headers["content-type"]})
            await response.prepare(request)
            pieces = []
            async for piece in told.content.iter_any():
                pieces.append(piece)
                await response.write(piece)
            proxy.answers.append(b"".join(pieces))
            await response.write_eof()
            return response

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await done.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
