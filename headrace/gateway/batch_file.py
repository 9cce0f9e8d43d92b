"""The file of a batch on its way to its upstream, as a multipart form.

The model of its first line says which upstream that is, and every line's model gets the name it has there: what the
upstream reads later must not need the gateway's names. Lines that are no requests stay as they are; whoever reads
them says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from headrace.gateway.body import Fields, form_field
from headrace.gateway.snapshot import Snapshot
from headrace.protocol.errors import ApiError

PURPOSE = "batch"
MAX_LINE_BYTES = 16 << 20
"""Of the first line, which is looked into for its model."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOT_BLANK = re.compile(rb"\S")


class _Asked(msgspec.Struct):
    model: str | None = None


class _Line(msgspec.Struct):
    body: _Asked


def form_text(form: bytes, content_type: bytes, name: str) -> str | None:
    """A text field of the form."""
    span = form_field(form, content_type, name)
    return None if span is None else form[span[0] : span[1]].decode("utf-8", "replace")


def is_batch(form: bytes, content_type: bytes) -> bool:
    return form_text(form, content_type, "purpose") == PURPOSE


def first_model(form: bytes, content_type: bytes) -> str | None:
    """The model that the first line asks for. None where it names none, is too long, or is no request."""
    span = _lines(form, content_type)
    first = None if span is None else _NOT_BLANK.search(form, *span)
    if span is None or first is None:
        return None
    limit = min(span[1], first.start() + MAX_LINE_BYTES)
    end = form.find(b"\n", first.start(), limit)
    try:
        return msgspec.json.decode(form[first.start() : end if end >= 0 else limit], type=_Line).body.model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def names_at(snapshot: Snapshot, upstream: str) -> dict[str, str]:
    """The names that models and aliases have at an upstream, where it knows them by another."""
    models = {
        name: next((target.model for target in model.targets if target.upstream == upstream), name)
        for name, model in snapshot.models.items()
    }
    models |= {alias: models.get(name, name) for alias, name in snapshot.aliases.items()}
    return {name: there for name, there in models.items() if name != there}


def renamed(form: bytes, content_type: bytes, names: Mapping[str, str]) -> bytes:
    """The form with the lines' models under other names; the very object where none of them is in it."""
    span = _lines(form, content_type)
    if span is None or not any(msgspec.json.encode(name) in form for name in names):
        return form
    lines = form[span[0] : span[1]].split(b"\n")
    return form[: span[0]] + b"\n".join([_renamed(line, names) for line in lines]) + form[span[1] :]


def _renamed(line: bytes, names: Mapping[str, str]) -> bytes:
    try:
        request = Fields(line)
        body = Fields(request.text("body"))
        there = names.get(str(body.value("model")))
    except ApiError:
        return line
    if there is None:
        return line
    return request.changed({"body": msgspec.Raw(body.changed({"model": there}))})


def _lines(form: bytes, content_type: bytes) -> tuple[int, int] | None:
    """Where the file's lines stand in the form."""
    span = form_field(form, content_type, "file")
    return None if span is None else (span[0] + 3 * form.startswith(_BYTE_ORDER_MARK, span[0]), span[1])
