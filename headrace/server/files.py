"""/v1/files: what batches read and what they have answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from headrace.protocol import batches as wire
from headrace.protocol import errors
from headrace.protocol.errors import ApiError, quoted
from headrace.server.file_store import Upload
from headrace.server.http import Exchange
from headrace.server.multipart import Form, boundary_of
from headrace.server.serving import Serving

PIECE_BYTES = 256 << 10
PAGE = 10_000
"""Files in a list: without `limit`, and at most."""


@contextmanager
def disk_errors() -> Iterator[None]:
    """What the disk refuses inside is an ApiError (500) with the system's reason."""
    try:
        yield
    except OSError as error:
        raise wire.storage_failed(error.strerror or str(error)) from None


async def upload(serving: Serving, exchange: Exchange) -> None:
    """A form with `purpose` batch and `file`, which goes to the disk as it comes."""
    try:
        boundary = boundary_of(exchange.headers.get("content-type", ""))
        store = serving.batches.open().store
        length = exchange.headers.get("content-length", "")
        if length.isdigit() and int(length) > store.file_limit_bytes + (1 << 20):
            raise wire.file_too_large(store.file_limit_bytes)
        with disk_errors(), closing(store.upload()) as arriving:
            made = await _arrived(exchange, boundary, arriving)
    except ApiError:
        await exchange.discard()  # much of the body may still be on its way
        exchange.answer_headers["connection"] = "close"
        raise
    await exchange.answer_json(made)


async def _arrived(exchange: Exchange, boundary: bytes, arriving: Upload) -> wire.FileObject:
    form = Form(boundary, arriving.write)
    await form.read(exchange.pieces())
    if form.filename is None:
        raise errors.missing_field("file", "send a form's part of this name, with the file's content.")
    fields = dict(form.fields)
    purpose = fields.pop("purpose", None)
    if purpose is None:
        raise errors.missing_field("purpose", "this server keeps files for batches: send `batch`.")
    if purpose != "batch":
        message = f"`purpose` is {quoted(purpose)}; this server keeps files for `batch` only."
        raise errors.invalid_value("purpose", message)
    for name in fields:
        if name.startswith("expires_after"):
            raise errors.unsupported_field("expires_after", "Delete files that are no longer needed.")
    exchange.warn_ignored(list(fields))
    return arriving.done(form.filename)


async def list_files(serving: Serving, exchange: Exchange) -> None:
    query = exchange.query
    found = serving.batches.open().store.newest_first()
    purpose = query.get("purpose")
    if purpose is not None:
        found = [file for file in found if file.purpose == purpose]
    if order_of(query) == "asc":
        found.reverse()
    await exchange.answer_json(page(found, query, default=PAGE, most=PAGE))


async def retrieve(serving: Serving, exchange: Exchange) -> None:
    await exchange.answer_json(serving.batches.open().store.get(_id_in(exchange.path)))


async def delete(serving: Serving, exchange: Exchange) -> None:
    batches, file_id = serving.batches.open(), _id_in(exchange.path)
    batches.store.get(file_id)
    reader = batches.reader_of(file_id)
    if reader is not None:
        raise wire.file_in_use(file_id, reader)
    with disk_errors():
        batches.store.delete(file_id)
    await exchange.answer_json({"id": file_id, "object": "file", "deleted": True})


async def content(serving: Serving, exchange: Exchange) -> None:
    store = serving.batches.open().store
    file = store.get(_id_in(exchange.path))
    with disk_errors():
        opened = store.path(file.id).open("rb")
    with opened:
        await exchange.stream({"content-type": "application/octet-stream", "content-length": str(file.bytes)})
        if exchange.method != "HEAD":
            while piece := await asyncio.to_thread(opened.read, PIECE_BYTES):
                await exchange.write(piece)
        await exchange.end()


def _id_in(path: str) -> str:
    """The id in a path such as /v1/files/file-1/content."""
    return path.split("files/", 1)[1].split("/", 1)[0]


def order_of(query: Mapping[str, str]) -> str:
    """asc or desc, which is the default. Raises ApiError (400)."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise errors.invalid_value("order", f"`order` is {quoted(order)}; use asc or desc.")
    return order


def page(items: Sequence[Any], query: Mapping[str, str], *, default: int, most: int) -> dict[str, object]:
    """The part of a list that `after` and `limit` ask for. Raises ApiError (400)."""
    limit = query.get("limit", str(default))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= most:
        raise errors.out_of_range("limit", limit, f"between 1 and {most}")
    after, start = query.get("after"), 0
    if after:
        ids = [item.id for item in items]
        if after not in ids:
            raise errors.invalid_value("after", f"`after` is {quoted(after)}, which is not in this list.")
        start = ids.index(after) + 1
    shown = items[start : start + int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + len(shown) < len(items),
    }
