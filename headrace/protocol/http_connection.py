"""A client's connection: uvicorn's protocol, with limits on what comes before a request is one.

A key is checked once a request's head is there, so the head itself must be bounded in size and in time; uvicorn with
httptools bounds neither. What is no HTTP gets JSON as well.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headrace.protocol import errors
from headrace.protocol.errors import ApiError

MAX_HEAD_BYTES = 256 * 1024
"""Of a request's first line and headers, and of a chunked body's trailers. One read from the socket more may pass."""
HEAD_S = 30.0
"""A new connection must have sent its first request's head by then."""


class Connection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_bytes = 0
        """Received since anything but a head or trailers came."""
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._patience = self.loop.call_later(HEAD_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._be_patient()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(errors.head_too_large(MAX_HEAD_BYTES))

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        self._be_patient()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's name for: what came is no HTTP."""
        self._refuse(errors.invalid_http())

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade is an offer that may be left, as curl's to speak HTTP/2; not worth two warnings."""

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _refuse(self, error: ApiError) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            return self.transport.abort()  # an answer to something else is under way
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
