"""The server process from the first line on the terminal to the last: load, serve, end.

    port free? ─► core knows its work ─► HTTP answers (503) while it loads ─► start-up block ─► serving ─► drain ─► gone

SIGTERM lets running requests finish (at most `shutdown_timeout_s`); Ctrl-C ends everything within two seconds; a
second signal ends it at once. The core never outlives this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from headrace.config.errors import ConfigError
from headrace.config.settings import EngineSettings, ServerSettings
from headrace.protocol.http_listener import CannotListen, listen
from headrace.protocol.ipc import EngineInfo
from headrace.server.core_start import StartCore
from headrace.server.engine_client import EngineClient, StartupError
from headrace.server.metrics import EngineMetrics, ThroughputLog
from headrace.server.progress import show_progress

if TYPE_CHECKING:
    from headrace.protocol.http_server import HttpServer
    from headrace.server.app import App

logger = logging.getLogger("headrace.server")
uvicorn_logger = logging.getLogger("uvicorn.error")

USUAL_PORT = 8000
STATS_INTERVAL_S = 10.0

HTTP_PATIENCE_S = 1.5
"""For the last answers to reach their clients."""
CORE_PATIENCE_S = 0.5
"""For the core to leave by itself before it is killed."""


def serve(
    engine_settings: EngineSettings,
    server_settings: ServerSettings,
    start_core: StartCore,
    banner: Callable[[EngineInfo], None],
) -> int:
    """Serve until a signal comes; the exit status. `banner` prints the start-up block once the model is ready.

    Must run in the main thread. 0: ended as asked; 1: could not start, and standard error says why.
    """
    configure_logging(server_settings.uvicorn_log_level)
    try:
        listener = listen(server_settings.host, server_settings.port, USUAL_PORT)
    except CannotListen as error:
        print(f"headrace: {error}", file=sys.stderr, flush=True)
        return 1
    with contextlib.closing(listener):
        return uvloop.run(_serve(engine_settings, server_settings, listener, start_core, banner))


def configure_logging(uvicorn_log_level: str, own_level: str = "INFO") -> None:
    """Lines on standard error; uvicorn's at a level of their own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [server] %(message)s", "%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("headrace").setLevel(own_level)
    level = "DEBUG" if uvicorn_log_level == "trace" else uvicorn_log_level.upper()
    logging.getLogger("uvicorn").setLevel(level)


class Ending:
    """When and how a process ends: by SIGTERM patiently, by SIGINT soon; the second signal ends it on the spot.

    `clients` are the engines whose cores must not outlive it.
    """

    def __init__(self) -> None:
        self.clients: list[EngineClient] = []
        self.came = asyncio.Event()
        self.first: signal.Signals | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._note, number)

    @property
    def is_patient(self) -> bool:
        return self.first == signal.SIGTERM

    def _note(self, number: signal.Signals) -> None:
        if self.first is not None:
            for client in self.clients:
                client.kill()
            os._exit(128 + number)
        self.first = number
        self.came.set()


async def _serve(
    engine_settings: EngineSettings,
    server_settings: ServerSettings,
    listener: socket.socket,
    start_core: StartCore,
    banner: Callable[[EngineInfo], None],
) -> int:
    status = await run_engine(engine_settings, server_settings, listener, start_core, banner, Ending())
    leave_soon(status)
    return status


async def run_engine(
    engine_settings: EngineSettings,
    server_settings: ServerSettings,
    listener: socket.socket,
    start_core: StartCore,
    banner: Callable[[EngineInfo], None],
    ending: Ending,
    listens: Callable[[], object] = lambda: None,
) -> int:
    """One engine and its HTTP server, on a loop that may run others, until `ending` comes; the exit status.

    `listens` is called once HTTP is answered, `banner` once the model is ready. 1: it could not start, and standard
    error says why.
    """
    started = time.monotonic()
    bound_heaps()
    metrics = EngineMetrics(server_settings.served_model_names[0])
    client = EngineClient(engine_settings, metrics, start_core=start_core)
    ending.clients.append(client)
    await client.start()
    ended = asyncio.create_task(ending.came.wait())
    app: App | None = None
    http: HttpServer | None = None
    tasks: list[asyncio.Task[None]] = []
    status = 0
    try:
        # The core loads meanwhile; the tokenizer takes its time too, so signals are served from here on.
        built = await asyncio.to_thread(build_server, engine_settings, server_settings, client, metrics)
        app, http = built
        app.serving.batches.resume()
        tasks.append(asyncio.create_task(http.serve(sockets=[listener])))
        listens()
        ready = asyncio.create_task(until_ready(client))
        await asyncio.wait({ready, ended, tasks[0]}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            info = ready.result()
            try:
                banner(info)
            except OSError as error:
                raise StartupError(f"standard output cannot be written: {error.strerror}") from None
            _announce(server_settings, listener, time.monotonic() - started)
            if server_settings.log_stats:
                tasks.append(asyncio.create_task(_log_stats(metrics, client)))
            await asyncio.wait({ended, tasks[0]}, return_when=asyncio.FIRST_COMPLETED)
        else:
            ready.cancel()
        if tasks[0].done():
            print(f"headrace: the HTTP server ended by itself: {tasks[0].exception()}", file=sys.stderr, flush=True)
            status = 1
    except (ConfigError, StartupError) as error:
        print(f"headrace: {error}", file=sys.stderr, flush=True)
        status = 1
    finally:
        ended.cancel()
        if app is not None:
            await app.serving.batches.stop()
        patient = ending.is_patient and client.state == "ready"
        await _end(client, http, tasks, server_settings.shutdown_timeout_s if patient else 0.0)
    return status


def build_server(
    engine_settings: EngineSettings, server_settings: ServerSettings, client: EngineClient, metrics: EngineMetrics
) -> tuple[App, HttpServer]:
    """The application around the client and the HTTP server to run it. Raises ConfigError."""
    # Imported here, as in build_app: the core process, which takes longest, is under way before any of this is read.
    from headrace.protocol.http_server import http_server

    app = build_app(engine_settings, server_settings, client, metrics)
    return app, http_server(app, ssl_keyfile=server_settings.ssl_keyfile, ssl_certfile=server_settings.ssl_certfile)


def build_app(
    engine_settings: EngineSettings, server_settings: ServerSettings, client: EngineClient, metrics: EngineMetrics
) -> App:
    """Tokenizer, chat template and routes around the client. Raises ConfigError."""
    from headrace.config.model_files import open_model
    from headrace.server.app import create_app
    from headrace.server.model_text import model_text

    files = open_model(Path(engine_settings.model), engine_settings.hf_overrides)
    text = model_text(engine_settings, server_settings, files)
    if text.problem is not None:
        logger.warning("%s", text.problem)
    return create_app(
        server_settings,
        engine_settings,
        client,
        text.tokenizer,
        text.template,
        generation_config=files.generation_config,
        metrics=metrics,
        tool_template=text.tool_template,
    )


async def until_ready(client: EngineClient) -> EngineInfo:
    """Shows how loading gets on until it is done. Raises StartupError."""
    waiting = asyncio.create_task(client.wait_ready())
    try:
        await show_progress(client, waiting)
        return await waiting
    finally:
        waiting.cancel()


def _announce(settings: ServerSettings, listener: socket.socket, seconds: float) -> None:
    """The lines that people and scripts wait for: from here on requests are served."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "https" if settings.ssl_certfile else "http"
    port = listener.getsockname()[1]
    logger.info("Ready after %.1f s.", seconds)
    uvicorn_logger.info("Application startup complete.")
    uvicorn_logger.info("Uvicorn running on %s://%s:%d (Press CTRL+C to quit)", scheme, host or "0.0.0.0", port)


async def _log_stats(metrics: EngineMetrics, client: EngineClient) -> None:
    log = ThroughputLog(metrics)
    while True:
        line = log.line(time.monotonic(), client.last_stats)
        if line is not None:
            logger.info("%s", line)
        await asyncio.sleep(STATS_INTERVAL_S)


async def _end(
    client: EngineClient, http: HttpServer | None, tasks: list[asyncio.Task[None]], patience_s: float
) -> None:
    if patience_s and client.num_open_requests:
        logger.info("Shutting down: %d requests may finish, for %g s.", client.num_open_requests, patience_s)
    if patience_s and not await client.drain(patience_s):
        logger.warning("%d requests were not done in %g s and end with an error.", client.num_open_requests, patience_s)
    if http is not None:
        http.should_exit = True
    stopping = asyncio.create_task(client.stop(CORE_PATIENCE_S))
    if http is not None and tasks:
        await asyncio.wait({tasks[0]}, timeout=HTTP_PATIENCE_S)
    await stopping
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def bound_heaps() -> None:
    """Have the C library keep two heaps, not one for each thread that once read a long text, and give back free ones.

    It is the same for the core, whose environment says so; this process has begun before it could be told.
    """
    M_ARENA_MAX, M_TRIM_THRESHOLD = -8, -1
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_ARENA_MAX, 2)
        mallopt(M_TRIM_THRESHOLD, 1 << 20)


def leave_soon(status: int) -> None:
    """A thread that still tokenizes a huge text must not hold up the end of the process."""
    alarm = threading.Timer(1.0, os._exit, (status,))
    alarm.daemon = True
    alarm.start()
