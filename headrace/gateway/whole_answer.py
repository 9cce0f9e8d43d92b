"""Whether a whole answer is what was asked for. Its outermost level is read, the rest where something depends on it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headrace.gateway import upstream_errors
from headrace.gateway.snapshot import Upstream
from headrace.gateway.stream import Wire
from headrace.gateway.upstream_client import UpstreamAnswer

ANSWERING = frozenset({"chat", "completions", "fim", "messages", "responses"})
LISTING = frozenset({"rerank", "score", "classify", "tokenize"})
"""Some servers answer these with a bare list."""


class Top(msgspec.Struct):
    """The outermost fields of an answer that matter here, as they stand in the text; empty where missing."""

    model: msgspec.Raw = msgspec.Raw()
    usage: msgspec.Raw = msgspec.Raw()
    choices: msgspec.Raw = msgspec.Raw()
    content: msgspec.Raw = msgspec.Raw()
    output: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
    object: msgspec.Raw = msgspec.Raw()


_decode_top = msgspec.json.Decoder(Top).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode = msgspec.json.Decoder().decode
_NULL, _ERROR = msgspec.Raw(b"null"), msgspec.Raw(b'"error"')
_WANTED: dict[Wire, str] = {"openai": "choices", "messages": "content", "responses": "output"}
_LIST, _OBJECTS = re.compile(rb"\["), re.compile(rb"\[\s*\{")
_TELLING = frozenset({"error", "object", "code", "type", "message"})


def checked(body: bytes, answer: UpstreamAnswer, upstream: Upstream, endpoint: str, wire: Wire) -> Top:
    """The outermost level of an answer that is what was asked for. Raises UpstreamFailure."""
    try:
        top = _decode_top(body)
    except (msgspec.MsgspecError, RecursionError):
        if endpoint in LISTING and _is_list(body):
            return Top()
        described = upstream_errors.described(body, answer.headers)
        raise upstream_errors.invalid_response(upstream, f"{described} came with status {answer.status}") from None
    if (top.error and top.error != _NULL) or top.object == _ERROR:
        told = {n: value_of(upstream, raw) for n, raw in _decode_object(body).items() if n in _TELLING}
        error = upstream_errors.error_in(told)
        if error:
            raise upstream_errors.from_error_body(upstream, error)
    lacks = _lacks(top, endpoint, wire)
    if lacks is not None:
        raise upstream_errors.invalid_response(upstream, f"its answer has no `{lacks}`")
    return top


def value_of(upstream: Upstream, text: bytes | msgspec.Raw) -> Any:
    """A part of an answer. Raises UpstreamFailure where it is malformed though the outermost level is not."""
    try:
        return _decode(text)
    except (msgspec.MsgspecError, RecursionError):
        raise upstream_errors.invalid_response(upstream, "a part of its answer is not JSON") from None


def _lacks(top: Top, endpoint: str, wire: Wire) -> str | None:
    """The field without which it is no answer."""
    if endpoint in ANSWERING:
        wanted = _WANTED[wire]
    elif endpoint == "embeddings":
        wanted = "data"
    else:
        return None
    needed = _OBJECTS if wanted == "choices" else _LIST
    return None if needed.match(getattr(top, wanted)) else wanted


def _is_list(text: bytes) -> bool:
    try:
        _decode_list(text)
    except msgspec.MsgspecError:
        return False
    return True
