"""/v1/batches: many requests in one file, answered when nobody else needs the engine."""

from __future__ import annotations

from headrace.protocol.batches import BatchFields
from headrace.protocol.json import Body
from headrace.server.files import disk_errors, page
from headrace.server.http import Exchange
from headrace.server.serving import Serving

PAGE, MAX_PAGE = 20, 100
"""Batches in a list: without `limit`, and at most."""


async def create(serving: Serving, exchange: Exchange) -> None:
    body = Body(await exchange.body(serving.settings.max_body_bytes))
    fields = body.read(BatchFields)
    exchange.warn_ignored(list(body.others()))
    with disk_errors():
        batch = serving.batches.open().create(fields)
    await exchange.answer_json(batch)


async def list_batches(serving: Serving, exchange: Exchange) -> None:
    found = serving.batches.open().newest_first()
    await exchange.answer_json(page(found, exchange.query, default=PAGE, most=MAX_PAGE))


async def retrieve(serving: Serving, exchange: Exchange) -> None:
    await exchange.answer_json(serving.batches.open().get(_id_in(exchange.path)))


async def cancel(serving: Serving, exchange: Exchange) -> None:
    with disk_errors():
        batch = serving.batches.open().cancel(_id_in(exchange.path))
    await exchange.answer_json(batch)


def _id_in(path: str) -> str:
    """The id in a path such as /v1/batches/batch_1/cancel."""
    return path.split("batches/", 1)[1].split("/", 1)[0]
