"""A request body of which only the outermost level is read.

    {"model": "a", "messages": [...], "x_new": 1}      fields: model, messages, x_new with their places in the text

A change is cut into the text at its place; everything else stays the bytes that the client sent, fields that we do
not know included. With nothing to change, `changed` returns the very object received.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocol import errors, json

_decode_top = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder().decode
encode = msgspec.json.Encoder().encode

_KEY = re.compile(rb'\s*+"((?:[^"\\]++|\\.)*+)"\s*+:\s*+', re.DOTALL)
_NEXT = re.compile(rb"\s*+([,}])")


MAX_FIELDS = 1000
"""Outermost fields of a body: each costs a step, and while they are walked through everybody waits."""


class Fields:
    """The outermost fields of a JSON object, and where their values stand in `raw`: name -> (start, end)."""

    __slots__ = ("_raws", "_spans", "raw")

    def __init__(self, raw: bytes) -> None:
        """Raises ApiError (400) unless `raw` is one JSON object with distinct keys, and not too many."""
        self.raw = raw
        try:
            self._raws = _decode_top(raw)
        except (msgspec.MsgspecError, RecursionError):
            json.Body(raw)  # raises with line and column
            raise errors.invalid_json("it is not an object.") from None
        if len(self._raws) > MAX_FIELDS:
            message = f"The request body has {len(self._raws)} fields; at most {MAX_FIELDS} are read."
            raise errors.ApiError(400, message, code="invalid_value")
        self._spans: dict[str, tuple[int, int]] | None = None
        """Not looked for before something changes, where the keys are known to be distinct without."""
        if not _is_usual(raw, self._raws):
            self._spans = _spans(raw, self._raws)

    def __contains__(self, name: str) -> bool:
        return name in self._raws

    def value(self, name: str) -> Any:
        """The decoded value; None where it is null or missing. Raises ApiError (400) for one that is malformed."""
        raw = self._raws.get(name)
        try:
            return None if raw is None else _decode(raw)
        except (msgspec.MsgspecError, RecursionError):
            return json.read_value(self._raws[name], self.raw)  # raises with the place

    def text(self, name: str) -> bytes:
        """The value as it stands in the text, b"" where it is missing."""
        raw = self._raws.get(name)
        return b"" if raw is None else bytes(raw)

    @property
    def raws(self) -> dict[str, msgspec.Raw]:
        """Each value as it stands, to be looked at and not changed."""
        return self._raws

    def changed(self, changes: Mapping[str, Any]) -> bytes:
        """The text with these values replaced or, where the field was missing, added at the end."""
        if not changes:
            return self.raw
        if self._spans is None:
            self._spans = _spans(self.raw, self._raws)
        cuts: list[tuple[int, int, bytes]] = []
        added: list[bytes] = []
        for name, value in changes.items():
            span = self._spans.get(name)
            if span is None:
                added.append(encode(name) + b":" + encode(value))
            else:
                cuts.append((*span, encode(value)))
        parts: list[bytes] = []
        position = 0
        for start, end, new in sorted(cuts):
            parts += (self.raw[position:start], new)
            position = end
        if not added:
            return b"".join([*parts, self.raw[position:]])
        closing = self.raw.rindex(b"}")
        separator = b"," if self._raws else b""
        return b"".join([*parts, self.raw[position:closing], separator, b",".join(added), self.raw[closing:]])


def _is_usual(text: bytes, raws: Mapping[str, msgspec.Raw]) -> bool:
    """Whether it is these fields as libraries write them: no blank, or one after each `:` and `,`."""
    for colon, comma in ((b":", b","), (b": ", b", ")):
        fields = [b'"%s"%s%s' % (name.encode(), colon, raw) for name, raw in raws.items()]
        if text == b"{%s}" % comma.join(fields):
            return True
    return False


def _spans(text: bytes, raws: Mapping[str, msgspec.Raw]) -> dict[str, tuple[int, int]]:
    """Walks the outermost level, one step per field. Raises ApiError (400) when a key is there twice.

    The walk knows each value from the parser, so it needs no look inside. A second `model` makes the text differ
    from what the parser kept (one value per key, the last), which the walk meets as a mismatch.
    """
    spans: dict[str, tuple[int, int]] = {}
    position = text.index(b"{") + 1
    after = b","
    for name, raw in raws.items():
        key = _KEY.match(text, position)
        value = bytes(raw)
        if after != b"," or key is None or not text.startswith(value, key.end()) or not _is(key[1], name):
            raise _mismatch(text)
        spans[name] = (key.end(), key.end() + len(value))
        following = _NEXT.match(text, key.end() + len(value))
        if following is None:
            raise _mismatch(text)
        after, position = following[1], following.end()
    if raws and after != b"}":
        raise _mismatch(text)
    return spans


def _is(key: bytes, name: str) -> bool:
    return bool(_decode(b'"' + key + b'"') == name) if b"\\" in key else key == name.encode()


def _mismatch(text: bytes) -> errors.ApiError:
    json.Body(text)  # raises with the key's name
    return errors.invalid_json("a key is there twice.")


_BOUNDARY = re.compile(rb'boundary="?([^";]+)"?', re.IGNORECASE)
MAX_PART_HEAD_BYTES = 16 * 1024


def form_field(body: bytes, content_type: bytes, name: str) -> tuple[int, int] | None:
    """Where the value of a field stands in a multipart/form-data body, None where it has no such field.

    One walk from part to part, whatever they hold.
    """
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        return None
    wanted = re.compile(
        rb'\r\ncontent-disposition:[^\r\n]*[; ]name="?' + re.escape(name.encode()) + rb'"?(?:;[^\r\n]*)?\r\n',
        re.IGNORECASE,
    )
    mark = b"\r\n--" + boundary[1]
    at = 0 if body.startswith(mark[2:]) else body.find(mark) + 2
    while at != 1:
        head = at + len(mark) - 2
        start = body.find(b"\r\n\r\n", head, head + MAX_PART_HEAD_BYTES) + 4
        if start == 3:
            return None
        end = body.find(mark, start - 2)
        if wanted.search(body, head, start - 2) is not None:
            return None if end < 0 else (start, max(start, end))
        at = end + 2
    return None


def with_form_field(body: bytes, content_type: bytes, name: str, value: str) -> bytes:
    """The form with this value in the field, which is added where the form lacks it."""
    span = form_field(body, content_type, name)
    if span is not None:
        return body[: span[0]] + value.encode() + body[span[1] :]
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        return body
    head = b'--%s\r\nContent-Disposition: form-data; name="%s"\r\n\r\n' % (boundary[1], name.encode())
    return head + value.encode() + b"\r\n" + body
