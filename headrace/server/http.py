"""One HTTP exchange over bare ASGI: the request's head and body, and the answer, whole or streamed.

The status line is held back until there is something to send, so an error found before the first token is
still a proper status. Extra headers (request id, CORS) are set once and go with whatever is answered.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from headrace.protocol import errors, sse
from headrace.protocol.errors import ApiError
from headrace.protocol.translate.events import Dialect
from headrace.protocol.translate.exchange import Outgoing
from headrace.protocol.translate.failures import error_payload

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = "application/json"

BODY_IDLE_S = 30.0
"""A body of which nothing arrives for so long is given up (408)."""
DISCARD_S = 10.0
"""How long an oversized body is read and thrown away, so that the client gets to read its 413."""
WRITE_STALL_S = 300.0
"""A reader that takes nothing for so long is treated as gone."""

MAX_NAMES = 20
"""Fields without effect that are named in a header."""

MAX_REQUEST_ID_CHARS = 128

_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")

encode_json = msgspec.json.Encoder().encode


def is_request_id(text: str) -> bool:
    """It may name a request in headers and logs."""
    return _REQUEST_ID.fullmatch(text) is not None


class ClientGone(Exception):
    """The client closed the connection, or stopped reading; there is nobody to answer."""


class Exchange:
    """A request being answered. `headers` have lower-case names; of repeated headers the last is kept."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
        """Of a parameter that is repeated the last is kept."""
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.answer_headers: dict[str, str] = {}
        self.request_id = ""
        self.answer_id: str | None = None
        """The id that a generated answer carries, once it has one."""
        sent = self.headers.get("x-request-id", "")
        self.request_id = sent if is_request_id(sent) else uuid.uuid4().hex
        self.answer_headers["x-request-id"] = self.request_id
        if sent != self.request_id and sent:
            self.warn_ignored(["x-request-id"])
        self.status: int | None = None
        """The status sent, None as long as nothing was."""
        self.is_streaming = False
        """A streamed answer has begun and not ended."""
        self.dialect: Dialect = "chat"
        """Whose errors the client reads."""
        self.is_background = False
        """A line of a batch: nobody waits for it, and whatever is to be said of it is in its answer."""
        self._write_began: float | None = None
        self._wrote_at = 0.0
        self._body: bytes | None = None
        self._has_come = False
        """All of the body."""
        self._receive = receive
        self._send = send

    def name(self, request_id: str | None) -> None:
        """Take the name that the body has for the request; one in the header goes before it.

        Raises ApiError (400) for one that is not short and printable."""
        if request_id is None:
            return
        if not is_request_id(request_id):
            allowed = f"1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters without blanks"
            raise errors.out_of_range("request_id", request_id, allowed)
        if "x-request-id" not in self.headers:
            self.request_id = self.answer_headers["x-request-id"] = request_id
        elif self.request_id != request_id:
            self.warn_ignored(["request_id"])

    def warn_ignored(self, names: Sequence[str]) -> None:
        """Tell the client which fields of its body had no effect, if there are any; a header has room for some."""
        told = self.answer_headers.get("x-headrace-ignored", "")
        listed = dict.fromkeys(told.split(",") if told else ())
        listed |= dict.fromkeys(re.sub(r"[^\x21-\x2b\x2d-\x7e]", "?", name)[:64] for name in names)
        if listed:
            self.answer_headers["x-headrace-ignored"] = ",".join(list(listed)[:MAX_NAMES])

    async def body(self, limit_bytes: int) -> bytes:
        """The whole body, kept for who reads it next. Raises ApiError 408, 413 or 415, ClientGone."""
        if self._body is not None:
            return self._body
        self._check_encoding()
        length = self.headers.get("content-length", "")
        if length.isdigit() and int(length) > limit_bytes:
            await self.discard()
            raise errors.request_too_large(limit_bytes)
        parts: list[bytes] = []
        size = 0
        async for part in self.pieces():
            size += len(part)
            if size > limit_bytes:
                parts.clear()
                await self.discard()
                raise errors.request_too_large(limit_bytes)
            parts.append(part)
        self._body = b"".join(parts)
        return self._body

    def _check_encoding(self) -> None:
        encoding = self.headers.get("content-encoding", "").strip()
        if encoding.lower() not in ("", "identity"):
            raise errors.unsupported_encoding(encoding)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, of any length. Raises ApiError 408, 415, ClientGone."""
        self._check_encoding()
        while not self._has_come:
            try:
                async with asyncio.timeout(BODY_IDLE_S):
                    message = await self._receive()
            except TimeoutError:
                raise errors.request_timeout(BODY_IDLE_S) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            self._has_come = not message.get("more_body", False)
            yield message.get("body", b"")

    async def discard(self) -> None:
        """Take what is still to come of the body and throw it away, so that the client gets to read the answer."""
        if self._has_come:
            return
        try:
            async with asyncio.timeout(DISCARD_S):
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    more = message.get("more_body", False)
        except TimeoutError:
            return

    async def disconnected(self) -> None:
        """Returns when the client is gone. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self, status: int, body: bytes, content_type: str = JSON, headers: Mapping[str, str] | None = None
    ) -> None:
        length = {} if status == 204 else {"content-type": content_type, "content-length": str(len(body))}
        await self._start(status, {**length, **(headers or {})})
        await self._write({"type": "http.response.body", "body": body})

    async def answer_json(self, value: object, status: int = 200) -> None:
        await self.answer(status, encode_json(value))

    async def answer_error(self, error: ApiError) -> None:
        headers = dict(error.headers)
        if self.dialect == "messages":
            headers["request-id"] = self.request_id
        await self.answer(error.status, encode_json(error_payload(self.dialect, error, self.request_id)), JSON, headers)

    async def write_error(self, error: ApiError) -> None:
        """An error in a stream that has begun, and its end."""
        payload = error_payload(self.dialect, error, self.request_id)
        if self.dialect == "messages":
            await self.write(Outgoing(payload, "error").encode())
        else:
            await self.write(sse.error_event(error))
        await self.end()

    async def stream(self, headers: Mapping[str, str]) -> None:
        """Begin a streamed answer with status 200."""
        await self._start(200, headers)
        self.is_streaming = True

    async def write(self, data: bytes) -> None:
        """Send a piece of a streamed answer; waits while the client reads more slowly than we write."""
        await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        self.is_streaming = False
        await self._write({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        merged = {**headers, **self.answer_headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in merged.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, message: Message) -> None:
        self._write_began = time.monotonic()
        await self._send(message)
        self._write_began = None
        self._wrote_at = time.monotonic()

    @property
    def is_stalled(self) -> bool:
        """A write has waited for longer than `WRITE_STALL_S`. To be looked at now and then: a timer for each write
        would cost more than the write."""
        began = self._write_began
        return began is not None and time.monotonic() - began > WRITE_STALL_S

    def is_silent(self, seconds: float) -> bool:
        """A streamed answer has begun, and nothing was written for so long."""
        return self.is_streaming and self._write_began is None and time.monotonic() - self._wrote_at >= seconds
