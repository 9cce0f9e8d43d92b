"""Which headers cross the gateway, in either direction: only those named here.

What a client sends is never forwarded by default, so neither its key, its cookies nor hop-by-hop headers can leak;
what an upstream sends is not passed back by default either.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import headrace

if TYPE_CHECKING:
    from headrace.gateway.snapshot import Upstream

RawHeaders = Sequence[tuple[bytes, bytes]]

TO_UPSTREAM = frozenset(
    b"accept openai-beta anthropic-version anthropic-beta idempotency-key traceparent tracestate "
    b"x-session-id x-claude-code-session-id x-stainless-helper-method".split()
)
TO_OPENAI = TO_UPSTREAM - {b"anthropic-version", b"anthropic-beta"}
TO_CLIENT = frozenset(
    b"content-type content-disposition openai-processing-ms openai-version retry-after retry-after-ms".split()
)
NEVER = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade host cookie content-length authorization x-api-key "
    b"api-key x-goog-api-key proxy-authorization proxy-connection accept-encoding expect".split()
)
"""Refused even where the configuration names them as extra headers, except for the upstream's own authentication."""

SESSION = frozenset({b"x-session-id", b"x-claude-code-session-id", b"session_id", b"session-id"})

EVENT_STREAM: RawHeaders = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

ANTHROPIC_VERSION = b"2023-06-01"
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


class OwnHeaders(NamedTuple):
    """What an upstream gets with every request: unless the request has its own, and whatever the request has."""

    usual: Mapping[bytes, bytes]
    always: Mapping[bytes, bytes]


def own_headers(upstream: Upstream) -> OwnHeaders:
    """Authentication is the upstream's own, whatever the client sent."""
    usual = {b"user-agent": b"headrace/" + headrace.__version__.encode()}  # some firewalls refuse who has none
    always = {b"accept-encoding": b"identity"}
    key = upstream.api_key
    if upstream.dialect == "anthropic":
        usual[b"anthropic-version"] = ANTHROPIC_VERSION
        if key is not None:
            always[b"x-api-key"] = key.encode()
    elif key is not None:
        always[b"authorization"] = b"Bearer " + key.encode()
    for extra, text in upstream.headers:
        name = extra.lower().encode()
        if name not in NEVER or name in (b"authorization", b"x-api-key", b"api-key"):
            always[name] = text.encode()
    return OwnHeaders(usual, always)


def forwarded(
    sent: RawHeaders, request_id: bytes, *, dialect: str, content_type: bytes | None = None
) -> dict[bytes, bytes]:
    """What of a client's headers an upstream of this dialect gets."""
    headers = {b"x-request-id": request_id}
    if content_type is not None:
        headers[b"content-type"] = content_type
    names = TO_UPSTREAM if dialect == "anthropic" else TO_OPENAI
    headers.update([pair for pair in sent if pair[0] in names])
    return headers


def ignored(received: Mapping[bytes, bytes], dropped: Sequence[str] = ()) -> list[tuple[bytes, bytes]]:
    """The fields that had no effect, in one header: those that the upstream names and those that were left out here."""
    told = received.get(b"x-headrace-ignored")
    if told is None and not dropped:
        return []
    named = [*(told or b"").decode("latin-1").split(","), *dropped]
    names = dict.fromkeys(name.strip() for name in named if name.strip())
    return [(b"x-headrace-ignored", as_value(",".join(names)))] if names else []


@functools.lru_cache(maxsize=500)
def way(upstream: str, model: str) -> RawHeaders:
    """Who was asked, and for which model."""
    return (b"x-gateway-upstream", as_value(upstream)), (b"x-gateway-model", as_value(model))


def as_value(text: str) -> bytes:
    return "".join(c if " " <= c <= "~" else "?" for c in text).encode()


def to_client(received: RawHeaders) -> list[tuple[bytes, bytes]]:
    """What of an upstream's headers, names in lower case, the client gets."""
    return [pair for pair in received if pair[0] in TO_CLIENT]
