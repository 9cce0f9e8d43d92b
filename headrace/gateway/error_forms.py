"""Errors as each dialect writes them: as a body, and inside a stream that has begun.

OpenAI: `data: {"error": {...}}` and no [DONE]; Anthropic: `event: error`; Responses: `response.failed`.
"""

from __future__ import annotations

import msgspec

from headrace.gateway.paths import ErrorForm
from headrace.protocol.errors import ApiError
from headrace.protocol.translate.failures import anthropic_payload, responses_error

_encode = msgspec.json.Encoder().encode


def body(error: ApiError, form: ErrorForm, request_id: str) -> bytes:
    return _encode(anthropic_payload(error, request_id)) if form == "anthropic" else error.body()


def in_band(
    error: ApiError, form: ErrorForm, request_id: str, *, response_id: str | None = None, sequence_number: int = 0
) -> bytes:
    """The last event of a stream that broke."""
    if form == "anthropic":
        return b"event: error\ndata: " + _encode(anthropic_payload(error, request_id)) + b"\n\n"
    if form == "responses":
        response = {"id": response_id or f"resp_{request_id}", "object": "response", "status": "failed"}
        value = {
            "type": "response.failed",
            "sequence_number": sequence_number,
            "response": {**response, "error": responses_error(error), "output": [], "usage": None},
        }
        return b"event: response.failed\ndata: " + _encode(value) + b"\n\n"
    return b"data: " + _encode({"error": error.payload()["error"]}) + b"\n\n"


def keep_alive(form: ErrorForm) -> bytes:
    """What tells the client and the boxes between that the connection lives."""
    return b'event: ping\ndata: {"type": "ping"}\n\n' if form == "anthropic" else b": keep-alive\n\n"


def comment(text: str) -> bytes:
    """Between two events, for people and not for clients."""
    return (": " + "".join(c if " " <= c <= "~" else "?" for c in text) + "\n\n").encode()
