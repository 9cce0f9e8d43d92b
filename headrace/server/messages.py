"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect over the same engine as chat."""

from __future__ import annotations

from collections.abc import AsyncIterator

from headrace.protocol import errors
from headrace.protocol.translate.events import answer_of
from headrace.protocol.translate.exchange import Exchange as Translation
from headrace.protocol.translate.exchange import Outgoing, typed
from headrace.protocol.translate.listings import token_count
from headrace.protocol.translate.messages_writer import MessagesWriter, write_whole
from headrace.server.chat import Chat, begin_chat
from headrace.server.client_names import ClientNames, named_as
from headrace.server.http import Exchange
from headrace.server.replies import watched
from headrace.server.serving import Serving
from headrace.server.translated import counted, events_of, outgoing, read_asked, read_body, stream_events

_PING = typed({"type": "ping"})


async def messages(serving: Serving, exchange: Exchange) -> None:
    """`max_tokens`, which this dialect wants in every request, is taken for what fits where it is more than that."""
    serving.ready_info()
    exchange.answer_headers["request-id"] = exchange.request_id
    body = await read_body(serving, exchange)
    if body.get("max_tokens") is None:
        raise errors.missing_field("max_tokens", "say how many tokens the answer may have.")
    asked = await read_asked(serving, exchange, body, "messages")
    with named_as(asked.names):
        chat = await begin_chat(serving, exchange, asked.fields, asked.sampling, prefix="msg", shortens_answer=True)
    told = Translation(
        client="messages",
        upstream="chat",
        model=chat.head.model,
        request_id=exchange.request_id,
        created_s=chat.head.created,
        stream=asked.conversation.stream,
        origins=asked.conversation.origins,
    )

    async def whole() -> None:
        await exchange.answer_json(write_whole(answer_of(await events_of(chat, asked.names)), told))

    with serving.generating():
        if not told.stream:
            return await watched(exchange, whole(), b"")
        writer = MessagesWriter(told)
        await stream_events(exchange, _with_ping(chat, writer, asked.names), writer, ping=_PING.encode())


async def _with_ping(chat: Chat, writer: MessagesWriter, names: ClientNames) -> AsyncIterator[list[Outgoing]]:
    """A ping follows `message_start`, as Anthropic's own streams have it."""
    is_first = True
    async for events in outgoing(chat, writer, names):
        yield [events[0], _PING, *events[1:]] if is_first else events
        is_first = False


async def count_tokens(serving: Serving, exchange: Exchange) -> None:
    serving.ready_info()
    body = await read_body(serving, exchange)
    asked = await read_asked(serving, exchange, {**body, "stream": False}, "messages")
    with named_as(asked.names):
        count = await counted(serving, exchange, asked)
    await exchange.answer_json(token_count("messages", count))
