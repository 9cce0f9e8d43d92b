"""Running gateways for tests: `running_gateway` is a real process over a config file and a data directory of its own.

with running_gateway(folder, providers(fake=upstream)) as gateway:
    httpx.post(gateway.url + "/v1/chat/completions", headers=gateway.auth, json=...)
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn
import uvloop

from headrace.gateway.app import create_app
from headrace.gateway.breaker import Breakers
from headrace.gateway.config_load import load_config
from headrace.gateway.keys import KeyRequest
from headrace.gateway.ledger import Ledger, open_ledger, open_store
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.snapshot import Limits
from headrace.gateway.state import GatewayState
from headrace.gateway.usage import UsageWriter
from headrace.gateway.usage_event import UsageEvent
from headrace.gateway.usage_queries import recent_usage
from headrace.protocol.http_connection import Connection
from tests.gateway.dialects import Answer
from tests.gateway.fake_upstream import FakeUpstream
from tests.serving import HEADRACE, free_port, health_status

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
UPSTREAM_KEY = "upstream-key-7f3c9a1e5b"
"""What the gateway sends to fake upstreams."""


@dataclass(frozen=True)
class Gateway:
    """A running gateway and a key for it."""

    url: str
    key: str
    data_dir: Path
    config: Path
    process: psutil.Popen
    log_path: Path

    @property
    def auth(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def new_key(self, name: str, **rights: Any) -> str:
        """Another key, seen by the gateway within a second."""
        return make_key(self.data_dir, name, **rights)


def make_key(data_dir: Path, name: str, **rights: Any) -> str:
    """The secret of a new key; `rights` are fields of KeyRequest."""
    store = open_store(None, data_dir)
    try:
        return store.create(KeyRequest(name=name, **rights))[1]
    finally:
        store.database.close()


def providers(*, routing: Mapping[str, Any] | None = None, **upstreams: FakeUpstream | Mapping[str, Any]) -> str:
    """A providers/routing JSON as the seeds have it. A fake upstream serves the models `fake` and `NAME-model`."""
    entries = {}
    for name, upstream in upstreams.items():
        if isinstance(upstream, FakeUpstream):
            entries[name] = provider(upstream.url, name)
        else:
            entries[name] = dict(upstream)
    return json.dumps({"providers": entries, "routing": {"default": next(iter(entries)), **(routing or {})}}, indent=2)


def provider(url: str, name: str = "fake", **more: Any) -> dict[str, Any]:
    return {"base_url": url + "/v1", "api_key": UPSTREAM_KEY, "models": ["fake", f"{name}-model"], **more}


@contextmanager
def running_gateway(
    folder: Path,
    config: str,
    *,
    suffix: str = ".json",
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    clean_exit: bool = True,
) -> Iterator[Gateway]:
    """Start `headrace gateway` over the text `config`, yield it once it is healthy, end it with SIGTERM."""
    port = free_port()
    data_dir = folder / "data"
    config_path = folder / f"gateway{suffix}"
    config_path.write_text(config)
    log_path = folder / "gateway.log"
    key = make_key(data_dir, "test")
    argv = [str(HEADRACE), "gateway", "--config", str(config_path), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--data-dir", str(data_dir), *flags]
    with log_path.open("wb") as log:
        process = psutil.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    gateway = Gateway(
        url=f"http://127.0.0.1:{port}",
        key=key,
        data_dir=data_dir,
        config=config_path,
        process=process,
        log_path=log_path,
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while health_status(gateway.url) != 200:
            assert process.poll() is None, f"exited {process.returncode} while starting: {argv}\n{gateway.log()}"
            assert time.monotonic() < deadline, f"not healthy after {START_TIMEOUT_S} s: {argv}\n{gateway.log()}"
            time.sleep(0.05)
        yield gateway
        if clean_exit:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            status = process.wait(STOP_TIMEOUT_S)
            assert status == 0, f"SIGTERM ended it with status {status}\n{gateway.log()[-6000:]}"
            assert "Traceback" not in gateway.log(), gateway.log()[-6000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(5)


class RecordedUsage:
    """The usage writer, and beside it every event it was given."""

    def __init__(self, writer: UsageWriter) -> None:
        self.writer = writer
        self.events: list[UsageEvent] = []

    def append(self, event: UsageEvent) -> None:
        self.events.append(event)
        self.writer.append(event)


@dataclass
class ThreadedGateway:
    """The gateway's application under uvicorn in a thread."""

    port: int
    key: str
    state: GatewayState
    ledger: Ledger
    usage: RecordedUsage
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.client_with(self.key)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def events(self) -> list[UsageEvent]:
        return self.usage.events

    def client_with(self, key: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"})

    def new_key(self, name: str, **limits: Any) -> str:
        """The secret of another key, usable at once."""
        secret = self.ledger.store.create(KeyRequest(name=name, limits=Limits(**limits)))[1]
        self.ledger.keys.reload()
        return secret

    def forget(self) -> None:
        """Events, and what breakers have seen."""
        self.events.clear()
        self.state.breakers = Breakers()

    def event(self, answer: Answer) -> UsageEvent:
        """What was billed for an answer."""
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            for event in self.events:
                if event.request_id == answer.request_id:
                    return event
            time.sleep(0.005)
        raise AssertionError(f"no usage event for {answer}")

    def wait_for_events(self, number: int, timeout_s: float = 5) -> list[UsageEvent]:
        deadline = time.monotonic() + timeout_s
        while len(self.events) < number:
            assert time.monotonic() < deadline, f"{len(self.events)} usage events, {number} were expected"
            time.sleep(0.005)
        return self.events

    def wait_until_idle(self, timeout_s: float = 5) -> bool:
        """Until no request is being answered and no slot is taken."""
        deadline = time.monotonic() + timeout_s
        while self.state.num_open or self.state.limiter.in_flight():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def in_flight_of(self, name: str) -> int:
        return self.state.limiter.load(self.ledger.store.find(name).id).in_flight

    def stored_events(self) -> list[UsageEvent]:
        """What is in the database, everything until now included."""
        assert self.usage.writer.flush()
        return recent_usage(self.ledger.database, limit=10_000)


@contextmanager
def threaded_gateway(folder: Path, config: str, *, suffix: str = ".json") -> Iterator[ThreadedGateway]:
    """Serve the text `config` in a thread, with a key that has no limits."""
    path = folder / f"gateway{suffix}"
    path.write_text(config)
    snapshot = load_config(path, {})
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    ledger = open_ledger(None, folder / "data")
    usage = RecordedUsage(ledger.usage)
    state = GatewayState(
        snapshot=snapshot,
        keys=ledger.keys,
        limiter=ledger.limiter,
        usage=usage,
        metrics=GatewayMetrics(),
        prompts=ledger.prompts,
    )
    secret = ledger.store.create(KeyRequest(name="test"))[1]
    ledger.keys.reload()
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(state),
            http=Connection,
            lifespan="off",
            access_log=False,
            log_level="warning",
            proxy_headers=False,
        )
    )

    async def serve() -> None:
        await server.serve(sockets=[listener])
        await state.close()

    thread = threading.Thread(target=uvloop.run, args=(serve(),), name="gateway", daemon=True)
    thread.start()
    gateway = ThreadedGateway(listener.getsockname()[1], secret, state, ledger, usage)
    try:
        yield gateway
    finally:
        gateway.client.close()
        server.should_exit = True
        thread.join(10)
        ledger.close()


async def _abort(port: int, request: bytes, wait_s: float) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await asyncio.sleep(wait_s)
    writer.transport.abort()


def abort_many(port: int, request: bytes, number: int, *, at_once: int) -> None:
    """Begin `number` requests and leave each after 0 to 30 ms, `at_once` at a time."""

    async def run() -> None:
        async def work(start: int) -> None:
            for index in range(start, number, at_once):
                await _abort(port, request, (index * 7 % 31) / 1000)

        await asyncio.gather(*map(work, range(at_once)))

    asyncio.run(run())
