"""The gateway process from the first line on the terminal to the last: read, open, listen, serve, drain.

SIGTERM lets running requests finish (at most `drain_s`), while new ones get 503 and /health/ready says so; Ctrl-C
ends everything within two seconds; a second signal ends it at once. Usage is written before the process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import uvloop

from headrace.config import gateway_defaults
from headrace.config.errors import ConfigError
from headrace.gateway.app import create_app
from headrace.gateway.balance import Load
from headrace.gateway.config_load import NO_OVERRIDES, InvalidConfig, Overrides, load_config
from headrace.gateway.engine_load import follow_loads
from headrace.gateway.exchange import Application
from headrace.gateway.health import check_health
from headrace.gateway.keys import KeyRecord
from headrace.gateway.ledger import Ledger, open_ledger
from headrace.gateway.logs import GatewayLog
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.redact import Redactor
from headrace.gateway.reload import Reloader
from headrace.gateway.route import default_model
from headrace.gateway.snapshot import Listen, Snapshot
from headrace.gateway.state import GatewayState
from headrace.gateway.traces import Tracer
from headrace.protocol.access_errors import API_KEYS_PAGE
from headrace.protocol.http_listener import CannotListen, listen
from headrace.protocol.http_server import LAST_BYTES_S, http_server

GIVE_WAY_S = 0.0005
"""So soon the threads that write usage and log let the event loop go on; Python's usual 5 ms are a request's length."""

logger = logging.getLogger("headrace.gateway")

Pages = Callable[[GatewayState, Ledger], Application]


def run(config_path: str | None, overrides: Overrides = NO_OVERRIDES, *, pages: Pages | None = None) -> int:
    """Serve until a signal comes; the exit status. `pages` builds the application for paths that are not the API's.

    0: ended as asked; 1: the address or the database cannot be used; 2: the configuration is wrong.
    """
    try:
        snapshot = load_config(config_path, os.environ, overrides=overrides)
    except InvalidConfig as error:
        for line in error.problems:
            print(f"headrace gateway: {line}", file=sys.stderr)
        return 2
    at = snapshot.listen
    try:
        listener = listen(at.host, at.port, gateway_defaults.PORT)
    except CannotListen as error:
        print(f"headrace gateway: {error}", file=sys.stderr)
        return 1
    log = GatewayLog(redactor=Redactor(secrets_of(snapshot)))
    with contextlib.closing(listener), contextlib.closing(log):
        try:
            ledger = open_ledger_at(at, API_KEYS_PAGE if pages is not None else None)
        except ConfigError as error:
            print(f"headrace gateway: {error}", file=sys.stderr)
            return 1
        log.start(at.log_level)
        with contextlib.closing(ledger):
            record, secret = ledger.store.first()
            if secret is not None:
                ledger.keys.reload()
            try:
                print("\n".join(banner(snapshot, listener.getsockname()[1], record, secret)), flush=True)
            except OSError as error:
                print(f"headrace gateway: standard output cannot be written: {error.strerror}", file=sys.stderr)
                return 1
            sys.setswitchinterval(GIVE_WAY_S)
            uvloop.run(serve(snapshot, overrides, ledger, listener, log, pages))
    return 0


def open_ledger_at(at: Listen, page: str | None = None) -> Ledger:
    """The database that the configuration names. `page` is this gateway's own for keys, if it has one. Raises
    ConfigError."""
    return open_ledger(
        at.database_url,
        at.data_dir or gateway_defaults.DATA_DIR,
        page=at.page_url or page,
        retention_days=at.retention_days,
        gateways=at.gateways,
    )


def secrets_of(snapshot: Snapshot) -> list[str]:
    """What must never be in a log line: the upstreams' keys and extra headers, and those of the trace collector."""
    secrets = [upstream.api_key for upstream in snapshot.upstreams.values() if upstream.api_key]
    headers = [value for upstream in snapshot.upstreams.values() for _, value in upstream.headers]
    if snapshot.listen.traces is not None:
        headers += [value for _, value in snapshot.listen.traces.headers]
    return [secret for secret in [*secrets, *headers] if len(secret) > 7]


def banner(snapshot: Snapshot, port: int, record: KeyRecord, secret: str | None) -> Iterable[str]:
    """What a person needs: the three pieces, base URL, key and model, and where the configuration is."""
    listen = snapshot.listen
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(listen.host, listen.host)
    host = f"[{host}]" if ":" in host else host
    yield f"Base URL       http://{host}:{port}/v1"
    if secret is not None:
        yield f"API key        {secret}    (shown this once)"
    else:
        yield f"API key        {record.shown}    (`headrace key create` makes another)"
    first = default_model(snapshot)
    names = [name for name in snapshot.models if name != first]
    yield f"Models         {', '.join([*([first] if first else []), *names]) or 'whatever the upstreams serve'}"
    for name, upstream in snapshot.upstreams.items():
        yield f"Upstream       {name}: {', '.join(upstream.base_urls)}"
    yield f"Configuration  {snapshot.path or 'none: the engine on this machine'}"
    for warning in snapshot.warnings:
        yield f"Note: {warning}"


async def serve(
    snapshot: Snapshot,
    overrides: Overrides,
    ledger: Ledger,
    listener: socket.socket,
    log: GatewayLog,
    pages: Pages | None,
    *,
    ended: asyncio.Event | None = None,
    is_patient: Callable[[], bool] = lambda: True,
) -> None:
    """Serve until a signal comes, or `ended` is set by whoever runs this beside something else.

    `is_patient` is asked at the end: may running requests finish?
    """
    state = make_state(snapshot, ledger, log)
    came = asyncio.Event() if ended is None else ended
    signals: list[int] = []

    def note(number: int) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)
        came.set()

    if ended is None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, note, number)

    def take(found: Snapshot) -> None:
        state.take(found)
        log.redactor = Redactor(secrets_of(found))

    def report(problem: str | None) -> None:
        state.reload_error = problem
        state.metrics.config_failures += problem is not None

    reloader = Reloader(snapshot, os.environ, take, overrides, report)
    state.spawn(reloader.run())
    state.spawn(check_health(state))
    state.spawn(follow_loads(state))
    if state.tracer is not None:
        state.spawn(state.tracer.run())
    server = http_server(create_app(state, pages(state, ledger) if pages else None), proxy_headers=False)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    waiting = asyncio.create_task(came.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if signals != [signal.SIGINT] and is_patient():
        await _drain(state)
    server.should_exit = True
    await asyncio.wait({serving}, timeout=LAST_BYTES_S + 1.5)
    await state.close()


def make_state(snapshot: Snapshot, ledger: Ledger, log: GatewayLog | None = None) -> GatewayState:
    """The state over an open ledger, with the gauges of /metrics connected. Must run on the loop that serves."""
    metrics = GatewayMetrics()
    state = GatewayState(
        snapshot=snapshot,
        keys=ledger.keys,
        limiter=ledger.limiter,
        usage=ledger.usage,
        metrics=metrics,
        prompts=ledger.prompts,
    )
    tracing = snapshot.listen.traces
    if tracing is not None:
        tracer = state.tracer = Tracer(tracing)
        metrics.spans_dropped = lambda: tracer.num_dropped
    metrics.config_generation = snapshot.generation
    metrics.breakers = lambda: breaker_states(state)
    metrics.replicas = lambda: replica_loads(state)
    metrics.usage_waiting = lambda: ledger.usage.waiting
    metrics.prompts_dropped = lambda: ledger.prompts.num_dropped
    if log is not None:
        metrics.log_lines_dropped = lambda: log.num_dropped
    return state


def replica_loads(state: GatewayState) -> Iterator[tuple[str, int, Load]]:
    for upstream in state.snapshot.upstreams.values():
        for replica in range(len(upstream.replicas)):
            yield upstream.name, replica, state.balancer.load(upstream.name, replica)


def breaker_states(state: GatewayState) -> list[tuple[str, str, str]]:
    """(upstream, model, state), of several replicas the worst."""
    order = ("closed", "half_open", "open")
    worst: dict[tuple[str, str], str] = {}
    for (upstream, _, model), found in state.breakers.states(time.monotonic()).items():
        before = worst.get((upstream, model), "closed")
        worst[(upstream, model)] = max(before, found, key=order.index)
    return [(upstream, model, found) for (upstream, model), found in worst.items()]


async def _drain(state: GatewayState) -> None:
    """Running requests may finish; new ones are refused meanwhile."""
    state.is_draining = True
    patience_s = state.snapshot.listen.drain_s
    if state.num_open:
        logger.info("Shutting down: %d requests may finish, for %g s.", state.num_open, patience_s)
    deadline_s = time.monotonic() + patience_s
    while state.num_open and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
