"""Which headers cross the gateway, in either direction: only those named here.

What a client sends is never forwarded by default, so neither its key, its cookies nor hop-by-hop headers can leak;
what an upstream sends is not passed back by default either.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.gateway.snapshot import Upstream

RawHeaders = Sequence[tuple[bytes, bytes]]

TO_UPSTREAM = frozenset(
    b"accept openai-beta anthropic-version anthropic-beta idempotency-key traceparent tracestate "
    b"x-session-id x-claude-code-session-id x-stainless-helper-method".split()
)
ANTHROPIC_ONLY = frozenset({b"anthropic-version", b"anthropic-beta"})
TO_CLIENT = frozenset(
    b"content-type content-disposition openai-processing-ms openai-version retry-after retry-after-ms".split()
)
NEVER = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade host cookie content-length authorization x-api-key "
    b"api-key x-goog-api-key proxy-authorization proxy-connection accept-encoding expect".split()
)
"""Refused even where the configuration names them as extra headers, except for the upstream's own authentication."""

SESSION = (b"x-session-id", b"x-claude-code-session-id", b"session_id", b"session-id")

EVENT_STREAM: RawHeaders = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

ANTHROPIC_VERSION = "2023-06-01"
_PRINTABLE = frozenset(range(0x21, 0x7F))


class TextHeaders(Mapping[str, str]):
    """Request headers as text, decoded when asked for."""

    def __init__(self, raw: Mapping[bytes, bytes]) -> None:
        self._raw = raw

    def __getitem__(self, name: str) -> str:
        return self._raw[name.lower().encode("latin-1")].decode("latin-1")

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._raw)

    def __len__(self) -> int:
        return len(self._raw)


def request_id(sent: bytes | None) -> bytes:
    """The client's name for the request, or a new one if it is not short and printable."""
    if sent and len(sent) <= 128 and _PRINTABLE.issuperset(sent):
        return sent
    return b"%032x" % random.getrandbits(128)  # a name, not a secret: no system call for it


def to_upstream(
    sent: RawHeaders, upstream: Upstream, request_id: bytes, *, dialect: str, content_type: str | None
) -> dict[str, str]:
    """The headers of an upstream request. Authentication is the upstream's own, whatever the client sent."""
    headers = {"accept-encoding": "identity", "x-request-id": request_id.decode("latin-1")}
    if content_type is not None:
        headers["content-type"] = content_type
    for name, value in sent:
        if name in TO_UPSTREAM and (dialect == "anthropic" or name not in ANTHROPIC_ONLY):
            headers[name.decode("latin-1")] = value.decode("latin-1")
    key = upstream.api_key
    if dialect == "anthropic":
        headers.setdefault("anthropic-version", ANTHROPIC_VERSION)
        if key is not None:
            headers["x-api-key"] = key
    elif key is not None:
        headers["authorization"] = f"Bearer {key}"
    for extra, text in upstream.headers:
        if extra.lower().encode("latin-1") not in NEVER or extra.lower() in ("authorization", "x-api-key", "api-key"):
            headers[extra.lower()] = text
    return headers


def to_client(received: RawHeaders) -> list[tuple[bytes, bytes]]:
    """What of an upstream's headers the client gets."""
    return [(lower, value) for name, value in received if (lower := name.lower()) in TO_CLIENT]
