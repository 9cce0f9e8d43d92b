"""The least a Python gateway can do with this stack: uvicorn, httptools, uvloop and aiohttp, passing bytes through.

    python -m headrace.bench.gateway_floor UPSTREAM_URL PORT

No key, no route, no limits, no error handling: the yardstick of `bench.gateway`, not a gateway.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import aiohttp
import uvicorn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Passthrough:
    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        if self.session is None:
            connector = aiohttp.TCPConnector(limit=1000, keepalive_timeout=4)
            self.session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {"content-type": "application/json"}
        async with self.session.post(self.upstream + scope["path"], data=body, headers=headers) as answer:
            names = ("content-type", "content-length")
            kept = [(n.encode(), answer.headers[n].encode()) for n in names if n in answer.headers]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for data in answer.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def main() -> None:
    upstream, port = sys.argv[1], int(sys.argv[2])
    # A socket made with its protocol named: only then does asyncio set TCP_NODELAY on what it accepts.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(
        Passthrough(upstream), loop="uvloop", http="httptools", lifespan="off", access_log=False, log_level="warning"
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
