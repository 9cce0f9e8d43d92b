"""What clients may do with a response afterwards: read it, its input, cancel it, delete it."""

from __future__ import annotations

import asyncio
import contextlib

from headrace.protocol import errors
from headrace.server.http import Exchange
from headrace.server.response_store import page
from headrace.server.serving import Serving

PAGE, MAX_PAGE = 20, 100
"""Items in a list: without `limit`, and at most."""


def _id_in(path: str) -> str:
    """The id in a path such as /v1/responses/resp_1/cancel."""
    return path.split("responses/", 1)[1].split("/", 1)[0]


async def retrieve(serving: Serving, exchange: Exchange) -> None:
    if exchange.query.get("stream", "false") != "false":
        raise errors.unsupported_field("stream", "Ask for the response without it, as often as needed.")
    await exchange.answer_json(serving.responses.get(_id_in(exchange.path)).response)


async def delete(serving: Serving, exchange: Exchange) -> None:
    response_id = _id_in(exchange.path)
    stored = serving.responses.get(response_id)
    if stored.task is not None:
        await _cancelled(stored.task)
    serving.responses.remove(response_id)
    await exchange.answer_json({"id": response_id, "object": "response", "deleted": True})


async def cancel(serving: Serving, exchange: Exchange) -> None:
    """Only what runs in the background can be cancelled: other clients just leave."""
    response_id = _id_in(exchange.path)
    stored = serving.responses.get(response_id)
    if stored.task is None:
        status = stored.response["status"]
        if status != "cancelled":
            message = f"The response `{response_id}` is {status} and cannot be cancelled."
            raise errors.invalid_value("response_id", message)
        return await exchange.answer_json(stored.response)
    await _cancelled(stored.task)
    stored = serving.responses.get(response_id)
    if stored.task is not None:
        serving.responses.put({**stored.response, "status": "cancelled"}, stored.items)
    await exchange.answer_json(serving.responses.get(response_id).response)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def list_input_items(serving: Serving, exchange: Exchange) -> None:
    stored = serving.responses.get(_id_in(exchange.path))
    query = exchange.query
    limit = query.get("limit", str(PAGE))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_PAGE:
        raise errors.out_of_range("limit", limit, f"between 1 and {MAX_PAGE}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise errors.invalid_value("order", f"`order` is {errors.quoted(order)}; use asc or desc.")
    shown = page(stored.items, limit=int(limit), newest_first=order == "desc", after=query.get("after"))
    await exchange.answer_json(shown)
