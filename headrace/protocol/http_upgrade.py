"""Offers to upgrade a connection are left without a word, as HTTP allows; a body that came with one is read.

httptools' parser stops behind a head that offers an upgrade, as Java's client does with every request to speak HTTP/2.
Another parser then goes on with the body: it is given a head of its own that says how the body is framed, of which
the connection hears nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import httptools


class Callbacks(Protocol):
    """What a parser calls."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


def request_parser(callbacks: object) -> Any:
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def framing(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """The headers that say how long a body is; None where there is none."""
    lines = [b"%s: %s\r\n" % pair for pair in headers if pair[0] in (b"content-length", b"transfer-encoding")]
    return b"".join(lines) or None


def parser_of_body(callbacks: Callbacks, framing: bytes) -> Any:
    """A parser whose next byte is the first of a body that is framed like this; requests may follow it."""
    parser = request_parser(_BehindHead(callbacks))
    parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % framing)
    return parser


class _BehindHead:
    """Passes on what a parser calls, but for the head that was made up."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._is_past = False
        self.on_body = callbacks.on_body

    def on_message_begin(self) -> None:
        if self._is_past:
            self._callbacks.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_past:
            self._callbacks.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_past:
            self._callbacks.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_past:
            self._callbacks.on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_past = True
        self._callbacks.on_message_complete()
