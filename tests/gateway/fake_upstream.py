"""A scripted model server made of sockets: every fault an upstream can show, and a record of what reached it.

    with FakeUpstream() as upstream:                        # its own thread, its own loop
        upstream.script(chat_stream("Hel", "lo").cut(1))    # next request: one delta, then the connection closes
        ...call the gateway, whose config names upstream.url...
        assert upstream.requests[0].headers["authorization"] == "Bearer sk-upstream"

Replies are built in tests/gateway/replies.py. With nothing scripted the upstream answers by itself: path and body
say which dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.gateway import replies
from tests.gateway.replies import FOREVER_S, USAGE, Reply


@dataclass(kw_only=True)
class Request:
    """What arrived. Times are time.monotonic()."""

    connection: int
    method: str
    target: str
    raw_head: bytes
    headers: dict[str, str]
    """Lower-case names; of repeated headers the last."""
    body: bytes
    received_s: float
    parts_written: int = 0
    finished_s: float | None = None
    """When the whole scripted answer had been written."""
    client_left_s: float | None = None
    """When the client closed the connection before that."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def bearer(self) -> str | None:
        return self.headers.get("authorization", "").removeprefix("Bearer ") or None


Responder = Callable[[Request], Reply]


class FakeUpstream:
    """Listens on a free port of 127.0.0.1 between `with` and its end.

    `script` queues replies: each request takes the next one; with none left `answer` (a Reply or a function of the
    request) is used. `accept_after_s` delays every accept.
    """

    def __init__(
        self, answer: Reply | Responder | None = None, *, accept_after_s: float = 0.0, without: tuple[str, ...] = ()
    ) -> None:
        """`without`: ends of paths that it answers with 404, before anything scripted and without a record."""
        self.answer: Reply | Responder = automatic if answer is None else answer
        self.without = without
        self.accept_after_s = accept_after_s
        self.requests: list[Request] = []
        self.num_connections = 0
        self.open_connections: set[_Connection] = set()
        self.scripted: deque[Reply | Responder] = deque()
        self.port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake upstream", daemon=True)
        self._stop: asyncio.Event | None = None

    @property
    def url(self) -> str:
        """The root; `url + "/v1"` is what a client's base URL would be."""
        return f"http://127.0.0.1:{self.port}"

    def script(self, *replies: Reply | Responder) -> None:
        self.scripted.extend(replies)

    def forget(self) -> None:
        """Drop what is scripted and recorded, for a test that shares this upstream with others."""
        self.scripted.clear()
        self.requests.clear()
        self.answer = automatic

    @property
    def last(self) -> Request:
        return self.requests[-1]

    def wait_for(self, condition: Callable[[FakeUpstream], bool], timeout_s: float = 5.0) -> bool:
        """Poll until `condition(self)`; False when it did not come true in time."""
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def next_reply(self, request: Request) -> Reply:
        chosen = self.scripted.popleft() if self.scripted else self.answer
        return chosen if isinstance(chosen, Reply) else chosen(request)

    def __enter__(self) -> FakeUpstream:
        self._thread.start()
        assert self._ready.wait(10), "the fake upstream did not start"
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        accepting = asyncio.create_task(self._accept(listener))
        self._ready.set()
        await self._stop.wait()
        accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await accepting
        for connection in list(self.open_connections):
            connection.transport.abort()
        listener.close()
        await asyncio.sleep(0)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self.accept_after_s:
                await asyncio.sleep(self.accept_after_s)
            accepted, _ = await loop.sock_accept(listener)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.num_connections += 1
            number = self.num_connections
            with contextlib.suppress(OSError):
                await loop.connect_accepted_socket(lambda number=number: _Connection(self, number), accepted)


class _Connection(asyncio.Protocol):
    """One accepted connection: requests one after the other, each answered by its reply."""

    transport: asyncio.Transport

    def __init__(self, upstream: FakeUpstream, number: int) -> None:
        self.upstream = upstream
        self.number = number
        self.buffer = bytearray()
        self.arrived = asyncio.Event()
        self.gone = asyncio.Event()
        self.current: Request | None = None
        self.hang_up_next = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.upstream.open_connections.add(self)
        self.task = asyncio.get_running_loop().create_task(self.serve())

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.upstream.open_connections.discard(self)
        if self.current is not None and self.current.finished_s is None and self.current.client_left_s is None:
            self.current.client_left_s = time.monotonic()
        self.gone.set()
        self.arrived.set()

    async def serve(self) -> None:
        with contextlib.suppress(ConnectionError):
            while (request := await self.read()) is not None:
                if self.hang_up_next:
                    self.end(by_reset=False)
                    return
                self.current = request
                if request.path.endswith(self.upstream.without):
                    if not await self.write(request, replies.error(404, "Not Found")):
                        return
                    continue
                self.upstream.requests.append(request)
                reply = self.upstream.next_reply(request)
                self.hang_up_next = reply.hang_up_on_reuse
                if not await self.write(request, reply):
                    return

    async def more(self) -> None:
        self.arrived.clear()
        await self.arrived.wait()
        if self.gone.is_set():
            raise ConnectionError

    async def read(self) -> Request | None:
        while b"\r\n\r\n" not in self.buffer:
            await self.more()
        received_s = time.monotonic()
        raw_head, _, rest = bytes(self.buffer).partition(b"\r\n\r\n")
        request_line, *lines = raw_head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.buffer = bytearray(rest)
        if "chunked" in headers.get("transfer-encoding", ""):
            body = await self.read_chunks()
        else:
            length = int(headers.get("content-length", "0"))
            while len(self.buffer) < length:
                await self.more()
            body = bytes(self.buffer[:length])
            del self.buffer[:length]
        method, target, _ = request_line.split(" ", 2)
        return Request(
            connection=self.number,
            method=method,
            target=target,
            raw_head=raw_head,
            headers=headers,
            body=body,
            received_s=received_s,
        )

    async def read_chunks(self) -> bytes:
        body = b""
        while True:
            while b"\r\n" not in self.buffer:
                await self.more()
            size = int(bytes(self.buffer).partition(b"\r\n")[0], 16)
            start = self.buffer.index(b"\r\n") + 2
            while len(self.buffer) < start + size + 2:
                await self.more()
            body += self.buffer[start : start + size]
            del self.buffer[: start + size + 2]
            if size == 0:
                return body

    async def wait(self, seconds: float) -> None:
        """Sleep, or until the client leaves, which raises ConnectionError."""
        if seconds <= 0:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.gone.wait(), None if math.isinf(seconds) else seconds)
        if self.gone.is_set():
            raise ConnectionError

    async def write(self, request: Request, reply: Reply) -> bool:
        """False when the connection has ended."""
        await self.wait(reply.head_after_s)
        if reply.silent_end:
            request.finished_s = time.monotonic()
            return self.end(reply.ends_by_reset)
        if reply.raw is not None:
            self.transport.write(reply.raw)
            request.finished_s = time.monotonic()
            return self.end(reply.ends_by_reset)
        await self.send(_head(reply), reply.bytes_a_write)
        sent = reply.parts if reply.parts_sent is None else reply.parts[: reply.parts_sent]
        for index, part in enumerate(sent):
            if reply.stall_at_part == index:
                await self.wait(FOREVER_S)
            await self.wait(reply.pauses_s if index else reply.first_part_after_s)
            framed = b"%x\r\n%s\r\n" % (len(part), part) if reply.framing == "chunked" else part
            if framed and (part or reply.framing != "chunked"):
                await self.send(framed, reply.bytes_a_write)
            request.parts_written += 1
        if reply.stall_at_part is not None and reply.stall_at_part >= len(sent):
            await self.wait(FOREVER_S)
        if reply.parts_sent is not None:
            await asyncio.sleep(0.02)  # so that what was sent is read before a reset discards it
            request.finished_s = time.monotonic()
            return self.end(reply.ends_by_reset)
        if reply.framing == "chunked":
            await self.send(b"0\r\n\r\n", reply.bytes_a_write)
        request.finished_s = time.monotonic()
        if reply.framing == "close":
            return self.end(reply.ends_by_reset)
        return True

    async def send(self, data: bytes, bytes_a_write: int | None) -> None:
        step = bytes_a_write or len(data)
        for start in range(0, len(data), step):
            if self.gone.is_set():
                raise ConnectionError
            self.transport.write(data[start : start + step])
            if bytes_a_write:
                await asyncio.sleep(0)

    def end(self, by_reset: bool) -> bool:
        if by_reset:
            linger_zero = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_zero)
            self.transport.abort()
        else:
            self.transport.close()
        return False


REASONS = {100: "Continue", 103: "Early Hints", 200: "OK", 401: "Unauthorized", 404: "Not Found", 429: "Slow Down"}


def _head(reply: Reply) -> bytes:
    interim = b"".join(b"HTTP/1.1 %d %s\r\n\r\n" % (s, REASONS.get(s, "X").encode()) for s in reply.interim_statuses)
    lines = [f"HTTP/1.1 {reply.status} {REASONS.get(reply.status, 'X')}"]
    if reply.content_type is not None:
        lines.append(f"content-type: {reply.content_type}")
    lines += [f"{name}: {value}" for name, value in reply.headers]
    if reply.framing == "chunked":
        lines.append("transfer-encoding: chunked")
    elif reply.framing == "length":
        lines.append(f"content-length: {len(reply.body)}")
    return interim + ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """The URL of a listener that completes no connection: its queue is full and nobody accepts."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers = [socket.socket() for _ in range(4)]
    try:
        for filler in fillers:
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        time.sleep(0.05)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for filler in fillers:
            filler.close()
        listener.close()


def refused_url() -> str:
    """The URL of a port where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


# The answer when nothing is scripted


def automatic(request: Request) -> Reply:
    """A right answer to whatever was asked, in the dialect of the path; usage in streams as asked."""
    path = request.path.rstrip("/")
    if request.method == "GET" and path.endswith("/models"):
        return replies.models()
    if request.method == "GET" and path.endswith("/health"):
        return replies.json_reply({"status": "ok"})
    try:
        body = request.json
    except ValueError:
        return replies.error(400, "not JSON")
    model, streamed = body.get("model", "fake"), bool(body.get("stream"))
    if path.endswith("/embeddings"):
        return replies.embeddings(model=model)
    if path.endswith("/messages/count_tokens"):
        return replies.json_reply({"input_tokens": USAGE[0]})
    if path.endswith("/messages"):
        return replies.messages_stream(model=model) if streamed else replies.messages(model=model)
    if path.endswith("/responses"):
        return replies.responses_stream(model=model) if streamed else replies.responses(model=model)
    usage = USAGE if not streamed or (body.get("stream_options") or {}).get("include_usage") else None
    if path.endswith("/chat/completions"):
        return replies.chat_stream(model=model, usage=usage) if streamed else replies.chat(model=model, usage=usage)
    if path.endswith("/completions"):
        return (
            replies.completion_stream(model=model, usage=usage)
            if streamed
            else replies.completion(model=model, usage=usage)
        )
    return replies.error(404, f"There is no {path} here.")


@dataclass
class Upstreams:
    """Several named fake upstreams at once, for tests of fallback and routing."""

    by_name: dict[str, FakeUpstream] = field(default_factory=dict)

    def __getitem__(self, name: str) -> FakeUpstream:
        return self.by_name[name]


@contextlib.contextmanager
def fake_upstreams(*names: str) -> Iterator[Upstreams]:
    with contextlib.ExitStack() as stack:
        yield Upstreams({name: stack.enter_context(FakeUpstream()) for name in names})
