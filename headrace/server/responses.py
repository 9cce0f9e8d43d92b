"""POST /v1/responses and what belongs to a response afterwards: OpenAI's newer dialect over the same engine as chat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from headrace.protocol import errors, sse
from headrace.protocol.errors import ApiError
from headrace.protocol.translate.events import Begin, answer_of
from headrace.protocol.translate.exchange import Exchange as Translation
from headrace.protocol.translate.exchange import Outgoing
from headrace.protocol.translate.listings import token_count
from headrace.protocol.translate.responses_writer import ResponsesWriter, write_whole
from headrace.protocol.translate.translator import ECHOED
from headrace.server.chat import Chat, begin_chat
from headrace.server.client_names import ClientNames, named_as
from headrace.server.http import Exchange
from headrace.server.replies import watched
from headrace.server.response_store import input_items
from headrace.server.serving import Serving
from headrace.server.translated import counted, events_of, outgoing, read_asked, read_body, stream_events

logger = logging.getLogger("headrace.server")

Json = dict[str, Any]

_DONE = ("response.completed", "response.incomplete", "response.failed")


async def responses(serving: Serving, exchange: Exchange) -> None:
    """A response is stored unless `store` is false; with `background` it is answered at once and generated later."""
    serving.ready_info()
    body = await read_body(serving, exchange)
    store, background, previous = (_own(body, name) for name in ("store", "background", "previous_response_id"))
    if store is None and exchange.is_background:
        store = False  # a batch's answers are in its file, and would put out those that clients go on from
    items = _history(serving, previous) + _new_items(serving, body.get("input"))
    if background and (store is False or body.get("stream")):
        needs = "it is stored" if store is False else "nobody waits for a stream"
        raise errors.invalid_value("background", f"`background` works only where {needs}.")
    asked = await read_asked(serving, exchange, {**body, "input": items} if items else body, "responses")
    with named_as(asked.names):
        chat = await begin_chat(serving, exchange, asked.fields, asked.sampling, prefix="resp", where="input")
    echo = {name: body[name] for name in ECHOED if body.get(name) is not None}
    echo |= {"store": store is not False, "background": bool(background), "previous_response_id": previous}
    told = Translation(
        client="responses",
        upstream="chat",
        model=chat.head.model,
        request_id=exchange.request_id,
        created_s=chat.head.created,
        stream=asked.conversation.stream,
        origins=asked.conversation.origins,
        echo=echo,
    )

    def keep(event: Outgoing) -> None:
        if store is not False and event.data is not None and event.data["type"] in _DONE:
            serving.responses.put(event.data["response"], items)

    async def whole() -> None:
        response = write_whole(answer_of(await events_of(chat, asked.names)), told)
        if store is not False:
            serving.responses.put(response, items)
        await exchange.answer_json(response)

    if background:
        return await exchange.answer_json(_in_background(serving, chat, told, items, asked.names))
    with serving.generating():
        if not told.stream:
            return await watched(exchange, whole(), b"")
        writer = ResponsesWriter(told)
        await stream_events(exchange, outgoing(chat, writer, asked.names), writer, ping=sse.KEEP_ALIVE, seen=keep)


def _own(body: Json, name: str) -> Any:
    """A field that is this server's business, taken out of the body. Raises ApiError (400) for another type."""
    value = body.pop(name, None)
    expected = str if name == "previous_response_id" else bool
    if value is not None and not isinstance(value, expected):
        raise errors.invalid_type(name, "a string" if expected is str else "true or false", errors.quoted(value))
    return value


def _history(serving: Serving, previous: str | None) -> list[Json]:
    """Everything said up to an earlier response. Raises ApiError: 404, or 400 for one that is not done."""
    if previous is None:
        return []
    stored = serving.responses.get(previous, "previous_response_id")
    if stored.task is not None:
        raise errors.invalid_value("previous_response_id", f"the response `{previous}` is not done yet.")
    return [*stored.items, *stored.response["output"]]


def _new_items(serving: Serving, given: object) -> list[Json]:
    """A request's own items, those that it only names found among the stored ones. Raises ApiError (400)."""
    items = input_items(given)
    for place, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            named = item.get("id")
            found = serving.responses.item(named) if isinstance(named, str) else None
            if found is None:
                message = f"no stored response has the item {errors.quoted(named)}; send the item itself."
                raise errors.invalid_value(f"input[{place}].id", f"`input[{place}]`: {message}")
            items[place] = found
    return items


def _in_background(serving: Serving, chat: Chat, told: Translation, items: list[Json], names: ClientNames) -> Json:
    """The response as it begins; it goes on without its client."""
    writer = ResponsesWriter(told)
    begun = {**_begun(chat, told), "status": "queued"}

    async def generate() -> None:
        try:
            with serving.generating():
                async for events in outgoing(chat, writer, names):
                    keep(events)
        except ApiError as error:
            keep(writer.fail(error))
        except Exception:
            logger.exception("The response %s failed.", begun["id"])
            keep(writer.fail(errors.internal_error(str(begun["id"]))))

    def keep(events: Iterable[Outgoing]) -> None:
        for event in events:
            if event.data is not None and event.data["type"] in _DONE:
                serving.responses.put(event.data["response"], items)

    task = asyncio.create_task(generate())
    serving.responses.put({**begun, "status": "in_progress"}, items, task)
    return begun


def _begun(chat: Chat, told: Translation) -> Json:
    """A response without output yet."""
    (created, *_) = ResponsesWriter(told).write(Begin(chat.head.id, chat.head.model, chat.head.created))
    return dict((created.data or {})["response"])


async def input_tokens(serving: Serving, exchange: Exchange) -> None:
    """How many tokens a request's prompt has."""
    serving.ready_info()
    body = await read_body(serving, exchange)
    items = _history(serving, _own(body, "previous_response_id")) + _new_items(serving, body.get("input"))
    body = {name: value for name, value in body.items() if name not in ("store", "background", "stream")}
    asked = await read_asked(serving, exchange, {**body, "input": items} if items else body, "responses")
    with named_as(asked.names):
        count = await counted(serving, exchange, asked)
    await exchange.answer_json(token_count("responses", count))
