"""Finds the key in a request's headers, wherever clients put it, and forgives what copying does to it.

    authorization: Bearer sk-hr-...     OpenAI's SDKs, Claude Code's ANTHROPIC_AUTH_TOKEN
    x-api-key, api-key                  Anthropic's SDKs, Azure's manner, Continue
    x-goog-api-key                      Google's manner

Forgiven: blanks and line ends around it, quotes, signs that nobody sees, `Bearer` written twice or in any of the
headers. Several may carry it; when they differ, Authorization wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

import msgspec

from headrace.gateway.key_secrets import PREFIX
from headrace.protocol import access_errors

KEY_HEADERS = frozenset({b"x-api-key", b"api-key", b"x-goog-api-key"})
_DIRT = " \t\r\n\"'`<>\u00a0\u200b\ufeff".encode()
_FILLERS = ("empty", "none", "null", "dummy", "not-needed", "undefined")
_PLACEHOLDER = re.compile(r"[${}%\s]|your|x{4}", re.IGNORECASE)


class SentKey(msgspec.Struct, frozen=True):
    value: str
    conflicting: bool = False
    """Another header carries another key, which is not looked at."""

    def __repr__(self) -> str:
        return f"SentKey(conflicting={self.conflicting})"


def sent_key(headers: Mapping[bytes, bytes], page: str | None) -> SentKey:
    """The key in `headers` (names in lower case). Raises ApiError (401), naming `page`, when there is none to read."""
    authorization = _clean(headers.get(b"authorization", b""))
    found, problem = _bearer(authorization) if authorization else (b"", None)
    others: list[bytes] = []
    if not KEY_HEADERS.isdisjoint(headers):
        others = [value for name in headers if name in KEY_HEADERS and (value := _bare(headers[name]))]
    if not found and not others:
        raise access_errors.no_key(page) if problem is None else access_errors.malformed_key(problem, page)
    chosen = found or others[0]
    return SentKey(chosen.decode("utf-8", "replace"), bool(others) and any(value != chosen for value in others))


def _bearer(authorization: bytes) -> tuple[bytes, str | None]:
    """The key after `Bearer`, or b"" and what is wrong."""
    scheme, blank, rest = authorization.partition(b" ")
    if not blank:
        scheme, _, rest = authorization.partition(b"\t")
    if scheme != b"Bearer" and (kind := scheme.lower()) != b"bearer":
        if kind in (b"bearer:", b"bearer="):
            return b"", "a blank, and nothing else, must follow `Bearer`."
        if kind.startswith(b"bearer"):
            return b"", "the space after `Bearer` is missing."
        if rest:
            return b"", "its scheme is not `Bearer`."
        return b"", "it lacks the word `Bearer` before the key."
    key = _bare(rest)
    if not key or (len(key) == 6 and key.lower() == b"bearer"):
        return b"", "no key follows `Bearer`. Is the variable that should hold the key exported?"
    return key, None


def _bare(value: bytes) -> bytes:
    """Without any `Bearer` before it."""
    key = _clean(value)
    while key[:6].lower() == b"bearer" and key[6:7] == b" ":
        key = _clean(key[7:])
    return key


def _clean(value: bytes) -> bytes:
    return value.strip(_DIRT)


def hint(value: str, known_prefix: str, known_chars: int) -> str:
    """What an unknown key looks like, without repeating it."""
    if "$" in value or "{" in value:
        return "What was sent is a placeholder whose variable was not filled in."
    if not value.startswith(known_prefix):
        if _PLACEHOLDER.search(value):
            return "What was sent is a placeholder; the key itself belongs in its place."
        if value.lower() in _FILLERS:
            return "What was sent is a filler word; this gateway needs a real key."
        return f"This gateway's keys begin with {known_prefix}; what was sent looks like a key of another service."
    if len(value) != known_chars:
        return f"It has {len(value)} characters where {known_chars} are right: was it copied in part, or twice?"
    return "Look for a wrong character, or for the key of another gateway."


def without_keys(query: bytes) -> bytes:
    """A query without what could be this gateway's key: queries go on to upstreams."""
    beginning = PREFIX.encode()
    if beginning not in unquote_to_bytes(query):
        return query
    return b"&".join([pair for pair in query.split(b"&") if beginning not in unquote_to_bytes(pair)])
