"""A client's connection: HTTP/1.1 for an ASGI application, with limits on what comes before a request is one.

It stands where uvicorn's own protocol would, and differs in three ways. A key is checked once a request's head is
there, so the head itself is bounded in size and in time, and what is no HTTP gets JSON as well. An answer's head
leaves together with the first piece of its body, in one system call. And some things need no waiting for: a body
that came along with its head is in `scope[BODY]`, `scope["extensions"][CLIENT_LEFT]` takes a function to be called
when the client leaves, and `[ANSWER]` and `[WRITE]` write a whole answer or a piece of a body where the client takes
it at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

import httptools
import uvicorn

from headrace.protocol import errors
from headrace.protocol.errors import ApiError
from headrace.protocol.http_cycle import STATUS_LINE, Cycle, Headers
from headrace.protocol.http_upgrade import framing, parser_of_body, request_parser

MAX_HEAD_BYTES = 256 * 1024
"""Of a request's first line and headers, and of a chunked body's trailers, where one read from the socket may pass."""
MAX_URL_BYTES = 65_535
"""What the parser can take apart."""
HEAD_S = 30.0
"""A new connection must have sent its first request's head by then."""
MAX_UNREAD_BYTES = 64 * 1024
"""Of a body, before the application asks for it."""
LINGER_S, MAX_LINGER_BYTES = 1.0, 512 * 1024
"""So long, and so much of what still comes, a refused client is read: else a reset might take the answer from it."""
MAX_PIPELINED = 16
"""Requests that wait on a connection for the answer to an earlier one."""

CLIENT_LEFT = "headrace.client_left"
ANSWER = "headrace.answer"
WRITE = "headrace.write"


class Connection(asyncio.Protocol):
    """One connection. uvicorn's server makes it, and calls `shutdown` at its end."""

    def __init__(
        self, config: uvicorn.Config, server_state: Any, app_state: Any, _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        if not config.loaded:
            config.load()
        self.app: Any = config.loaded_app
        self.loop = _loop or asyncio.get_running_loop()
        self.server = server_state
        self.transport: asyncio.Transport
        self._keep_alive_s = float(config.timeout_keep_alive)
        self._parser: Any = request_parser(self)
        self._url = b""
        self._target = _Target(b"", "", b"", b"")
        """Of the latest request; a client's next one mostly has the same."""
        self._headers: list[tuple[bytes, bytes]] = []
        self._owes_continue = False
        self._head_bytes = 0
        """Received since anything but a head or trailers came."""
        self._read: Cycle | None = None
        """The request whose body is arriving."""
        self._answered: Cycle | None = None
        """The request that is being answered; it is the one being read, or an earlier one."""
        self._pipeline: deque[Cycle] = deque()
        self._is_reading = True
        self._is_refused = False
        self._writable: asyncio.Event | None = None
        """None = the client takes what is written."""
        self._waiting_since_s: float | None = None
        """For a request's head; None while a request is answered."""
        self._patience_s = HEAD_S
        self._timer: asyncio.TimerHandle
        self._when_left: Callable[[], object] | None = None
        self._extensions = {CLIENT_LEFT: self.when_left, ANSWER: self.answer, WRITE: self.write}
        self._usual_headers: tuple[object, bytes] = (None, b"")
        self._unread_framing: bytes | None = None
        """Of a body behind an offer to upgrade, which the parser did not read."""

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server.connections.add(self)
        self._client = _address(transport.get_extra_info("peername"))
        self._server_address = _address(transport.get_extra_info("sockname"))
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self._waiting_since_s = self.loop.time()
        self._timer = self.loop.call_later(self._patience_s, self._look_at_the_clock)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self._timer.cancel()
        self._parser = None
        self._pipeline.clear()
        if self._answered is not None:
            self._answered.leave()
        if self._when_left is not None:
            self._when_left()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._is_refused:
            if self._head_bytes > MAX_LINGER_BYTES:
                self.transport.close()
            return
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                if self._unread_framing is not None:
                    self._parser = parser_of_body(self, self._unread_framing)
                    self._unread_framing = None
                if data:
                    continue
            except httptools.HttpParserError:
                return self._refuse(self._fault())
            break
        if self._head_bytes > MAX_HEAD_BYTES and not (self._is_refused or self.transport.is_closing()):
            self._refuse(errors.head_too_large(MAX_HEAD_BYTES))

    def pause_writing(self) -> None:
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    @property
    def is_full(self) -> bool:
        """The client reads more slowly than is written."""
        return self._writable is not None

    async def drained(self) -> None:
        """Returns when the client takes more, or has left."""
        while self._writable is not None:
            await self._writable.wait()

    def pause_reading(self) -> None:
        if self._is_reading and not self.transport.is_closing():
            self._is_reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_reading and not self.transport.is_closing():
            self._is_reading = True
            self.transport.resume_reading()

    def shutdown(self) -> None:
        """The server ends: what is being answered is the last."""
        if self._answered is None:
            self.transport.close()
        for cycle in (self._answered, *self._pipeline):
            if cycle is not None:
                cycle.keep_alive = False

    def _look_at_the_clock(self) -> None:
        """Closes a connection that has waited too long for a request. One timer for all of the connection's life."""
        left_s = self._patience_s
        if self._waiting_since_s is not None:
            left_s += self._waiting_since_s - self.loop.time()
            if left_s <= 0:
                return self.transport.close()
        self._timer = self.loop.call_later(left_s, self._look_at_the_clock)

    # The parser

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._owes_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        if name == b"expect" and value.lower() == b"100-continue":
            self._owes_continue = True

    def _fault(self) -> ApiError:
        """What the parser, or `on_headers_complete`, did not take."""
        if len(self._url) > MAX_URL_BYTES:
            return errors.url_too_long(MAX_URL_BYTES)
        if self._head_size() > MAX_HEAD_BYTES:
            return errors.head_too_large(MAX_HEAD_BYTES)
        cycle = self._read
        if cycle is not None and cycle is self._answered and not cycle.is_whole:
            return errors.broken_body()
        return errors.invalid_http()

    def _head_size(self) -> int:
        """Bytes of the first line and the headers that have come, line ends and blanks left out."""
        return len(self._url) + sum(len(name) + len(value) for name, value in self._headers)

    def on_headers_complete(self) -> None:
        if self._head_bytes > MAX_HEAD_BYTES and self._head_size() > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # the parser ends with an error of its own
        self._head_bytes = 0
        self._waiting_since_s = None
        if self._target.url != self._url:
            self._target = _parsed(self._url)
        _, path, raw_path, query = self._target
        version = self._parser.get_http_version()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._server_address,
            "client": self._client,
            "scheme": self._scheme,
            "root_path": "",
            "headers": self._headers,
            "method": self._parser.get_method().decode("ascii"),
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "extensions": self._extensions,
        }
        if self._parser.should_upgrade():
            self._unread_framing = framing(self._headers)
        self._headers = []  # trailers are no headers: whoever stands before this server has not looked at them
        cycle = self._read = Cycle(
            self,
            scope,
            keep_alive=version != "1.0" and self._parser.should_keep_alive(),
            owes_continue=self._owes_continue,
        )
        if self._answered is None:
            self._begin(cycle)
        else:
            self._pipeline.append(cycle)
            if len(self._pipeline) >= MAX_PIPELINED:
                self.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if self._read is not None and self._read.arrived(body) > MAX_UNREAD_BYTES:
            self.pause_reading()

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if self._read is not None and self._unread_framing is None:
            self._read.arrived_whole()

    # One request after the other

    def when_left(self, callback: Callable[[], object]) -> None:
        """`callback` is called if the client leaves before the running request is answered."""
        self._when_left = callback
        if self._parser is None:
            self.loop.call_soon(callback)

    def _begin(self, cycle: Cycle) -> None:
        self._answered = cycle
        cycle.task = self.loop.create_task(cycle.run())
        self.server.tasks.add(cycle.task)

    def answered(self, cycle: Cycle) -> None:
        """The last byte of its answer is written."""
        self.server.total_requests += 1
        self._answered = self._when_left = None
        if not cycle.keep_alive:
            self.transport.close()
        elif not self.transport.is_closing():
            if not self._is_reading:
                self.resume_reading()
            if self._pipeline:
                self._begin(self._pipeline.popleft())
            else:
                self._patience_s = self._keep_alive_s
                self._waiting_since_s = self.loop.time()

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        """The whole answer to the running request. False where it must be sent and waited for instead."""
        if self._writable is not None or self._answered is None or self._parser is None:
            return False
        self._answered.answer(status, headers, body)
        return True

    def write(self, piece: bytes) -> bool:
        """One more piece of the running answer's body. False where it must be sent and waited for instead."""
        if self._writable is not None or self._answered is None or self._parser is None:
            return False
        self._answered.write(piece, more=True)
        return True

    def usual_headers(self) -> bytes:
        """Those of every answer, which uvicorn renews each second: the date."""
        pairs = self.server.default_headers
        if self._usual_headers[0] is not pairs:
            self._usual_headers = (pairs, b"".join([b"%s: %s\r\n" % pair for pair in pairs]))
        return self._usual_headers[1]

    def _refuse(self, error: ApiError) -> None:
        cycle = self._answered
        if cycle is not None:
            if cycle is not self._read or cycle.is_whole or cycle.has_begun:
                return self.transport.abort()  # an answer to something else is under way
            cycle.leave()  # whoever reads the body hears that no more comes
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        if not self.transport.can_write_eof():
            return self.transport.close()
        self.transport.write_eof()
        self.resume_reading()
        self._is_refused, self._head_bytes = True, 0
        self.loop.call_later(LINGER_S, self.transport.close)


class _Target(NamedTuple):
    """What a request's first line asks for."""

    url: bytes
    path: str
    raw_path: bytes
    query: bytes


def _parsed(url: bytes) -> _Target:
    parts = httptools.parse_url(url)
    path = parts.path.decode("ascii")
    return _Target(url, unquote(path) if "%" in path else path, parts.path, parts.query or b"")


def _address(name: object) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
