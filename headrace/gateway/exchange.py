"""One HTTP exchange over bare ASGI: the request's head and body, the answer whole or streamed, the client's leaving.

From `watch` on, the connection says when the client leaves: then the task that answers is cancelled wherever it
waits, and `ClientGone` comes out of `leaving`. A stream that has been quiet gets keep-alive comments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headrace.gateway import error_forms, headers
from headrace.gateway.paths import ErrorForm
from headrace.gateway.sent_key import without_keys
from headrace.protocol import errors
from headrace.protocol.errors import ApiError
from headrace.protocol.http_connection import ANSWER, CLIENT_LEFT, WRITE
from headrace.protocol.http_cycle import BODY

if TYPE_CHECKING:
    from headrace.gateway.keys import KeyRecord

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
RawHeaders = Sequence[tuple[bytes, bytes]]

BODY_IDLE_S = 30.0
DISCARD_S = 10.0
KEEP_ALIVE_S = 15.0
WRITE_STALL_S = 300.0
"""A reader that takes nothing for so long is treated as gone."""

_JSON = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The client closed the connection, or stopped reading; there is nobody to answer."""


class Exchange:
    """A request being answered. `headers` have lower-case names; of repeated headers the last is kept."""

    form: ErrorForm = "openai"
    key: KeyRecord | None = None
    """Whose request it is, once that is known."""
    status: int | None = None
    """The status sent, None as long as nothing was."""
    is_streaming = False
    """A stream of events has begun and not ended."""
    mid_event = False
    """What was last written ends inside an event."""
    client_left = False
    task: asyncio.Task[Any] | None = None
    """That answers, from `watch` on."""
    _finished = False
    _beat: asyncio.TimerHandle | None = None
    _beating: asyncio.Task[None] | None = None
    _last_write_s = 0.0
    _writing_since_s: float | None = None

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began_s = time.perf_counter()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        query: bytes = scope.get("query_string", b"")
        self.query = without_keys(query) if query else query
        self.raw_headers: RawHeaders = scope["headers"]
        self.headers = dict(self.raw_headers)
        client = scope.get("client")
        self.client_ip: str = client[0] if client else ""
        self.request_id = headers.request_id(self.headers.get(b"x-request-id"))
        self.answer_headers: list[tuple[bytes, bytes]] = [(b"x-request-id", self.request_id)]
        """Go with whatever is answered."""
        self.loop = asyncio.get_running_loop()
        self._when_left: Callable[[Callable[[], object]], None] = scope["extensions"][CLIENT_LEFT]
        self._answer_now: Callable[[int, RawHeaders, bytes], bool] = scope["extensions"][ANSWER]
        self._write_now: Callable[[bytes], bool] = scope["extensions"][WRITE]
        self._body: bytes | None = scope.get(BODY)
        """Where it came along with the head."""
        self._receive = receive
        self._send = send

    # The request

    async def body(self, limit_bytes: int) -> bytes:
        """The whole body. Raises ApiError 413, 415 or 408, ClientGone."""
        encoding = self.headers.get(b"content-encoding", b"").strip()
        if encoding.lower() not in (b"", b"identity"):
            if self._body is None:
                await self._discard()
            raise errors.unsupported_encoding(encoding.decode("latin-1"))
        if self._body is not None:
            if len(self._body) > limit_bytes:
                raise errors.request_too_large(limit_bytes)
            return self._body
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit_bytes:
            await self._discard()
            raise errors.request_too_large(limit_bytes)
        parts: list[bytes] = []
        size = 0
        message: Message = {"more_body": True}
        while message.get("more_body", False):
            message = await self._next()
            part = message.get("body", b"")
            size += len(part)
            if size > limit_bytes:
                parts.clear()
                await self._discard()
                raise errors.request_too_large(limit_bytes)
            parts.append(part)
        return b"".join(parts)

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout(BODY_IDLE_S):
                message = await self._receive()
        except TimeoutError:
            raise errors.request_timeout(BODY_IDLE_S) from None
        if message["type"] == "http.disconnect":
            self.client_left = True
            raise ClientGone
        return message

    async def _discard(self) -> None:
        """Read and drop the rest, so that the client gets to read its 413."""
        try:
            async with asyncio.timeout(DISCARD_S):
                while (await self._next()).get("more_body", False):
                    pass
        except (TimeoutError, ApiError):
            return

    # The client's leaving

    def leaving(self) -> _Leaving:
        """`with exchange.leaving():` around the work for a client: raises ClientGone when it leaves meanwhile."""
        return _Leaving(self)

    def watch(self) -> None:
        self._finished = False
        self.task = asyncio.current_task(self.loop)
        self._when_left(self.cut)

    def cut(self) -> None:
        """The client is gone: stop the work for it."""
        if not self._finished and not self.client_left and self.task is not None:
            self.client_left = True
            self.task.cancel()

    def unwatch(self) -> None:
        self._finished = True
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None

    # The answer

    async def answer(self, status: int, body: bytes, answer_headers: RawHeaders = (_JSON,)) -> None:
        self._finished = True
        length = () if status == 204 else ((b"content-length", b"%d" % len(body)),)
        answer_headers = [*answer_headers, *length]
        if self._answer_now(status, [*answer_headers, *self.answer_headers], body):
            self.status = status
        else:
            await self._start(status, answer_headers)
            await self._send({"type": "http.response.body", "body": body})

    def overhear(self, note: Callable[[bytes], None]) -> None:
        """`note` gets each piece of the answer's body as well."""
        send, write_now, answer_now = self._send, self._write_now, self._answer_now

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.body":
                note(message.get("body", b""))
            await send(message)

        def write_noted(piece: bytes) -> bool:
            if not write_now(piece):
                return False
            note(piece)
            return True

        def answer_noted(status: int, answer_headers: RawHeaders, body: bytes) -> bool:
            if not answer_now(status, answer_headers, body):
                return False
            note(body)
            return True

        self._send, self._write_now, self._answer_now = send_noted, write_noted, answer_noted

    async def answer_error(self, error: ApiError) -> None:
        """As a status with a body, or inside the stream that has begun."""
        if self.status is not None:
            return await self.break_off(error)
        extra = [(n.lower().encode("latin-1"), v.encode("latin-1", "replace")) for n, v in error.headers.items()]
        form: ErrorForm = "anthropic" if b"anthropic-version" in self.headers else self.form
        body = error_forms.body(error, form, self.request_id.decode())
        if form == "anthropic":
            extra.append((b"request-id", self.request_id))
        await self.answer(error.status, body, [_JSON, *extra])

    async def break_off(self, error: ApiError, *, response_id: str | None = None, sequence_number: int = 0) -> None:
        """End the stream with an error that the client can see."""
        if not self.is_streaming:
            return
        event = error_forms.in_band(
            error, self.form, self.request_id.decode(), response_id=response_id, sequence_number=sequence_number
        )
        await self.end_stream(event)

    async def end_stream(self, last: bytes) -> None:
        """End the stream with this event, wherever it stands."""
        await self.end((b"\n\n" if self.mid_event else b"") + last)

    def open_after(self, seconds: float, opening: Callable[[], RawHeaders]) -> None:
        """Begin the stream with a keep-alive comment if nothing has begun it until then; later ones each 15 s."""
        self._opening_headers = opening
        self._beat = self.loop.call_later(seconds, self._keep_alive)

    def _keep_alive(self) -> None:
        loop = self.loop
        quiet_s = loop.time() - self._last_write_s
        if self.status is None or (quiet_s >= KEEP_ALIVE_S - 0.1 and not self.mid_event):
            if self._writing_since_s is None:
                self._beating = loop.create_task(self._comment())
            elif loop.time() - self._writing_since_s > WRITE_STALL_S:
                return self.cut()
            quiet_s = 0.0
        self._beat = loop.call_later(max(KEEP_ALIVE_S - quiet_s, 0.1), self._keep_alive)

    async def _comment(self) -> None:
        if self.status is None:
            self.is_streaming = True
            await self._start(200, [*headers.EVENT_STREAM, *self._opening_headers()])
        self._last_write_s = self.loop.time()
        await self._send({"type": "http.response.body", "body": error_forms.keep_alive(self.form), "more_body": True})

    async def stream(self, status: int, answer_headers: RawHeaders, *, events: bool = True) -> None:
        """Begin a streamed answer, unless a keep-alive has done it."""
        if self._beating is not None and not self._beating.done():
            await self._beating
        if self.status is None:
            self.is_streaming = events
            await self._start(status, answer_headers)

    async def write(self, data: bytes) -> None:
        """Send a piece of a streamed answer; waits while the client reads more slowly than we write."""
        self._writing_since_s = self._last_write_s = self.loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing_since_s = None

    def write_now(self, data: bytes) -> bool:
        """`write` where it needs no waiting; False, and nothing is done, where it does."""
        if self._writing_since_s is not None or not self._write_now(data):
            return False
        self._last_write_s = self.loop.time()
        return True

    @property
    def is_writing(self) -> bool:
        """The client reads more slowly than we write, and is being waited for."""
        return self._writing_since_s is not None

    @property
    def is_finished(self) -> bool:
        """Nothing is left to be said to the client."""
        return self._finished

    async def end(self, data: bytes = b"") -> None:
        if self._beating is not None and not self._beating.done():
            await self._beating
        self.is_streaming = False
        self._finished = True
        await self._send({"type": "http.response.body", "body": data})

    async def _start(self, status: int, answer_headers: RawHeaders) -> None:
        self.status = status
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*answer_headers, *self.answer_headers]}
        )


class _Leaving:
    """Turns the cancellation that a leaving client causes into ClientGone; other cancellations pass."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __enter__(self) -> None:
        self._exchange.watch()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange.unwatch()
        if isinstance(error, asyncio.CancelledError) and self._exchange.client_left:
            if self._exchange.task is not None:
                self._exchange.task.uncancel()
            raise ClientGone from None
