"""One request and its answer on a connection, as the ASGI application sees them: `receive`, `send`, faults in between.

An answer's head is held until the first piece of its body comes, so that both leave in one system call, and what the
application gets wrong about its own head (a length, a line end) is an error before a client sees it.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.protocol.errors import ApiError

if TYPE_CHECKING:
    from headrace.protocol.http_connection import Connection

BODY = "headrace.body"

FAULT = ApiError(
    500,
    "The server failed while answering this request. Its log has the details.",
    type="server_error",
    code="internal_error",
)

Headers = Sequence[tuple[bytes, bytes]]
Message = MutableMapping[str, Any]

logger = logging.getLogger("headrace.http")


def _status_line(status: int) -> bytes:
    try:
        return f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n".encode()
    except ValueError:
        return f"HTTP/1.1 {status} \r\n".encode()


STATUS_LINE = {status: _status_line(status) for status in range(100, 600)}


class Cycle:
    """One request and its answer, as the application sees them."""

    __slots__ = (
        "_arrival",
        "_body",
        "_chunked",
        "_connection",
        "_gone",
        "_has_news",
        "_head",
        "_is_complete",
        "_is_whole",
        "_left_bytes",
        "_num_unread",
        "_owes_continue",
        "_started",
        "keep_alive",
        "scope",
        "task",
    )

    def __init__(self, connection: Connection, scope: dict[str, Any], *, keep_alive: bool, owes_continue: bool) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._body: list[bytes] = []
        self._num_unread = 0
        self._is_whole = False
        self._has_news = False
        self._arrival: asyncio.Event | None = None
        self._owes_continue = owes_continue
        self._gone = False
        self._head = b""
        """Composed and not yet sent."""
        self._started = False
        self._is_complete = False
        self._chunked = False
        self._left_bytes: int | None = None
        """Of a body whose length the head told; None where it told none."""

    async def run(self) -> None:
        connection = self._connection
        try:
            if self._is_whole:
                self.scope[BODY] = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            await connection.app(self.scope, self.receive, self.send)
        except Exception:
            logger.exception("A fault in answering %s %s.", self.scope["method"], self.scope["path"])
        finally:
            connection.server.tasks.discard(self.task)
            if not self._is_complete and not self._gone:
                self._fail()

    # The request

    @property
    def is_whole(self) -> bool:
        """All of its body has come."""
        return self._is_whole

    @property
    def has_begun(self) -> bool:
        """Its answer has."""
        return self._started

    def arrived(self, body: bytes) -> int:
        """A piece of the body. Returns how many bytes the application has not taken."""
        if self._is_complete:
            return 0
        self._body.append(body)
        self._num_unread += len(body)
        self._has_news = True
        if self._arrival is not None:
            self._arrival.set()
        return self._num_unread

    def arrived_whole(self) -> None:
        self._is_whole = self._has_news = True
        if self._arrival is not None:
            self._arrival.set()

    def leave(self) -> None:
        """The connection is gone."""
        self._gone = True
        if self._arrival is not None:
            self._arrival.set()

    async def receive(self) -> Message:
        connection = self._connection
        if self._owes_continue and not self._started and not connection.transport.is_closing():
            self._owes_continue = False
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._has_news or self._gone or self._is_complete):
            connection.resume_reading()
            self._arrival = asyncio.Event()
            await self._arrival.wait()
        if self._gone or self._is_complete:
            return {"type": "http.disconnect"}
        self._has_news = False
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._num_unread = 0
        return {"type": "http.request", "body": body, "more_body": not self._is_whole}

    # The answer

    async def send(self, message: Message) -> None:
        """Raises RuntimeError for what cannot be written as HTTP."""
        if self._connection.is_full:
            await self._connection.drained()
        if self._gone:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
            self._connection.loop.call_soon(self._send_head)
        else:
            self.write(message.get("body", b""), message.get("more_body", False))

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer. Raises RuntimeError as `send` does."""
        self._start(status, headers)
        self.write(body, more=False)

    def _start(self, status: int, headers: Headers) -> None:
        if self._started:
            raise RuntimeError("An answer began twice.")
        told = dict(headers)
        lines = [*map(b": ".join, headers)]
        length = told.get(b"content-length")
        if length is not None:
            self._left_bytes = int(length)
        elif self.scope["method"] == "HEAD" or status in (204, 304):
            self._left_bytes = 0
        elif self.scope["http_version"] != "1.0":  # there the connection's end is the body's
            self._chunked = True
            lines.append(b"transfer-encoding: chunked")
        if b"close" in told.get(b"connection", b"").lower():
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close")
        lines += (b"", b"")
        usual = self._connection.usual_headers()
        self._head = b"%s%s%s" % (STATUS_LINE[status], usual, b"\r\n".join(lines))
        num_lines = len(lines) + usual.count(b"\n")
        if self._head.count(b"\n") != num_lines or self._head.count(b"\r") != num_lines:
            raise RuntimeError("A header of the answer has a line end in it.")
        self._started = True

    def _send_head(self) -> None:
        """No piece of a body followed at once."""
        if self._head and not self._connection.transport.is_closing():
            self._connection.transport.write(self._head)
            self._head = b""

    def write(self, body: bytes, more: bool) -> None:
        if not self._started or self._is_complete:
            raise RuntimeError("A body came before its head, or after its end.")
        head, self._head = self._head, b""
        if self.scope["method"] == "HEAD":
            body, self._left_bytes = b"", None
        if self._chunked:
            data = b"%s%x\r\n%s\r\n" % (head, len(body), body) if body else head
            if not more:
                data += b"0\r\n\r\n"
        else:
            data = head + body if head else body
            if self._left_bytes is not None:
                self._left_bytes -= len(body)
                if self._left_bytes < 0:
                    raise RuntimeError("A body is longer than its head says.")
        if data:
            self._connection.transport.write(data)
        if not more:
            if self._left_bytes:
                raise RuntimeError("A body is shorter than its head says.")
            self._is_complete = True
            if self._arrival is not None:
                self._arrival.set()
            self._connection.answered(self)

    def _fail(self) -> None:
        """The application has ended without an answer, or in the middle of one."""
        if self._started:
            return self._connection.transport.close()
        self.keep_alive = False
        body = FAULT.body()
        self.answer(500, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))], body)
