"""Server-sent events as the OpenAI dialect uses them: one `data:` line and a blank line each.

    data: {"id": ..., "choices": [{"delta": {"content": "Hi"}}]}

    data: [DONE]

A stream that breaks ends with `data: {"error": ...}` and no `[DONE]`: the SDKs raise on it.
"""

from __future__ import annotations

import msgspec

from headrace.protocol.errors import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which every reader of events skips."""

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

_encoder = msgspec.json.Encoder()


def event(value: object) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return event({"error": error.payload()["error"]})
