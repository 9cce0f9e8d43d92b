"""uvicorn as the engine's server and the gateway both run it. Loading it takes longer than binding a socket does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn

from headrace.protocol.http_connection import Connection
from headrace.protocol.http_listener import BACKLOG

KEEP_ALIVE_S = 75
LAST_BYTES_S = 1.0
"""For answers to reach their clients once there is nothing left to say."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: in which order things end is decided by who runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: Any, **more: Any) -> HttpServer:
    """A server for an ASGI application, to be run on a socket of `listen`. `more` are settings of uvicorn's."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(LAST_BYTES_S)),
        **more,
    )
    return HttpServer(config)
