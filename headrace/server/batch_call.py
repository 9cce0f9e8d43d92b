"""A batch's line as a request: it goes the way of one that came by HTTP, route, checks and errors included.

Only the connection is missing: the body is there at once, nobody leaves, and the answer is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from headrace.protocol import errors
from headrace.protocol.batches import LineFault, LineRequest, Reply
from headrace.protocol.errors import ApiError, quoted
from headrace.server import routes
from headrace.server.http import Exchange, Message

Dispatch = Callable[[Exchange, str], Awaitable[object]]
"""Answers an exchange by the route of a canonical path, whatever goes wrong."""


class _Apart(msgspec.Struct, frozen=True):
    """Fields that ask for another way of answering than a line of a file."""

    stream: object = None
    background: object = None


def check_line(line: LineRequest) -> None:
    """Raises LineFault for a url that is no endpoint for batches."""
    if routes.canonical(line.url) not in routes.BATCH_PATHS:
        known = routes.batch_endpoints()
        guess = errors.nearest(line.url, known)
        hint = f"did you mean {guess}?" if guess else f"a batch can ask {', '.join(known)}."
        message = f"Line {line.number}: there is no {quoted(line.url)} for batches; {hint}"
        raise LineFault(line.number, "invalid_url", message, param="url", custom_id=line.custom_id)


async def call(dispatch: Dispatch, line: LineRequest) -> Reply:
    """The answer to a checked line."""
    body = line.body
    inbox: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    parts: list[bytes] = []

    async def receive() -> Message:
        if inbox:
            return inbox.pop()
        return await asyncio.Future()  # the client that a handler watches for never leaves

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    path = routes.canonical(line.url)
    exchange = Exchange({"method": "POST", "path": line.url, "headers": headers}, receive, send)
    exchange.is_background = True
    exchange.dialect = routes.dialect_of(path, exchange.headers)
    refusal = _refusal(body)
    if refusal is None:
        await dispatch(exchange, path)
    else:
        await exchange.answer_error(refusal)
    return Reply(
        status=exchange.status or 500,
        request_id=exchange.request_id,
        body=b"".join(parts),
        ignored=exchange.answer_headers.get("x-headrace-ignored", ""),
    )


def _refusal(body: bytes) -> ApiError | None:
    try:
        apart = msgspec.json.decode(body, type=_Apart)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the handler says what is wrong
    for name in ("stream", "background"):
        if getattr(apart, name) not in (None, False):
            return errors.invalid_value(
                name, f"`{name}` has no place in a batch: each line is answered whole. Leave it out."
            )
    return None
