"""Requests in Anthropic's and OpenAI's other dialect: read into a chat request, answered from the same deltas.

body ─► Conversation ─► ChatFields ─► (chat.py) ─► deltas ─► events ─► the dialect's events, or one body
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from headrace.protocol import errors, sse
from headrace.protocol.errors import ApiError
from headrace.protocol.json import Body, read_value
from headrace.protocol.openai_chat import ChatFields
from headrace.protocol.sampling import SamplingFields
from headrace.protocol.tools import tool_request
from headrace.protocol.translate import chat_request, translator
from headrace.protocol.translate.conversation import Conversation
from headrace.protocol.translate.delta_reader import DeltaReader
from headrace.protocol.translate.events import Dialect, Event
from headrace.protocol.translate.exchange import Outgoing
from headrace.protocol.unbuilt_fields import unknown_fields
from headrace.server.chat import Chat, prompt_of
from headrace.server.client_names import ClientNames, named_as
from headrace.server.http import Exchange
from headrace.server.replies import watched
from headrace.server.serving import Serving

logger = logging.getLogger("headrace.server")

Json = dict[str, Any]

_NO_PLACE = ("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "verbosity", "service_tier", "echo")
"""Fields of a chat request whose effect these dialects' answers have no place for."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Asked:
    """A request as chat has it. `dropped` are fields that have no effect."""

    conversation: Conversation
    fields: ChatFields
    sampling: SamplingFields
    dropped: tuple[str, ...]
    names: ClientNames


async def read_body(serving: Serving, exchange: Exchange) -> Json:
    """The body's object. Raises ApiError (400, 408, 413)."""
    raw = await exchange.body(serving.settings.max_body_bytes)

    def parsed() -> Json:
        Body(raw)
        value: Json = read_value(raw, raw)
        return value

    return await serving.aside(len(raw), parsed)


async def read_asked(serving: Serving, exchange: Exchange, body: Mapping[str, Any], dialect: Dialect) -> Asked:
    """Raises ApiError (400) naming the field at fault; fields without effect are named in the answer's header."""
    num_chars = len(str(body.get("messages") or body.get("input") or ""))
    with named_as(ClientNames(dialect)):
        asked = await serving.aside(num_chars, lambda: _asked(body, dialect, thinks=serving.thinks))
    if asked.dropped:
        exchange.warn_ignored(asked.dropped)
        if not exchange.is_background:
            names = ", ".join(asked.dropped)
            logger.info("Request %s to %s: no effect of %s", exchange.request_id, exchange.path, names)
    return asked


def _asked(body: Mapping[str, Any], dialect: Dialect, *, thinks: bool) -> Asked:
    conversation = translator.read_request(body, dialect)
    plain = replace(conversation, thinking=None, thinking_budget_tokens=None)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise errors.invalid_type("model", "a string", errors.quoted(model))
    chat, dropped = chat_request.write(
        plain, model=model or "", max_tokens_field="max_tokens", takes_effort=True, continues=True
    )
    names = list(dropped)
    names += [name for name in _NO_PLACE if chat.pop(name, None)]
    if conversation.thinking is not None:
        if thinks:
            chat["enable_thinking"] = conversation.thinking != "off"
            if conversation.thinking == "on" and conversation.thinking_budget_tokens is not None:
                chat["thinking_token_budget"] = conversation.thinking_budget_tokens
        elif conversation.thinking != "off":
            names.append("thinking")
    chat.pop("stream_options", None)
    read = Body(_encode(chat))
    client_names = ClientNames(dialect, tuple(tool.path for tool in conversation.tools))
    with named_as(client_names):
        fields, sampling = read.read(ChatFields), read.read(SamplingFields)
    if (sampling.n or 1) != 1 or (sampling.best_of or 1) != 1:
        raise errors.invalid_value("n", "this endpoint gives one answer a request; send the request several times.")
    names += unknown_fields(read.others())
    return Asked(conversation, fields, sampling, tuple(dict.fromkeys(names)), client_names)


async def counted(serving: Serving, exchange: Exchange, asked: Asked) -> int:
    """How many tokens the request's prompt has. Raises ApiError as an answer to it would."""
    fields = asked.fields
    serving.names.check(fields.model)
    format = serving.chat_format(None)
    prompt = await prompt_of(
        serving,
        format,
        fields.messages,
        tools=tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls),
        add_generation_prompt=None,
        continue_final_message=fields.continue_final_message,
        add_special_tokens=None,
        variables=format.variables(fields, exchange),
    )
    return len(prompt.token_ids)


class Writer(Protocol):
    """One of the dialects' writers in headrace/protocol/translate."""

    def write(self, event: Event) -> Iterable[Outgoing]: ...

    def fail(self, error: ApiError) -> Iterable[Outgoing]: ...


async def outgoing(chat: Chat, writer: Writer, names: ClientNames) -> AsyncIterator[list[Outgoing]]:
    """The dialect's events, as each delta gives them. Raises ApiError as the engine does, in the client's words."""
    reader = DeltaReader(chat.head)
    with named_as(names):
        async with aclosing(chat.deltas) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if delta.prompt_logprobs is not None:
                    continue
                chat.tally.add(delta)
                yield [sent for event in reader.read(delta, chat.tally.usage) for sent in writer.write(event)]


async def events_of(chat: Chat, names: ClientNames) -> list[Event]:
    """All events of an answer that is not streamed."""
    reader = DeltaReader(chat.head)
    found: list[Event] = []
    with named_as(names):
        async with aclosing(chat.deltas) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                chat.tally.add(delta)
                found += reader.read(delta, chat.tally.usage)
    return found


async def stream_events(
    exchange: Exchange,
    sent: AsyncIterator[list[Outgoing]],
    writer: Writer,
    *,
    ping: bytes,
    seen: Callable[[Outgoing], None] = lambda event: None,
) -> None:
    """Stream a dialect's events. Raises ApiError only while nothing has been sent, ClientGone when the client left.

    `ping` keeps a silent stream alive. `seen` is told every event.
    """

    async def work() -> None:
        try:
            async with aclosing(sent) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    if exchange.status is None:
                        await exchange.stream(sse.HEADERS)
                    for event in piece:
                        seen(event)
                    if piece:
                        await exchange.write(b"".join(event.encode() for event in piece))
        except ApiError as error:
            if exchange.status is None:
                raise
            failure = list(writer.fail(error))
            for event in failure:
                seen(event)
            await exchange.write(b"".join(event.encode() for event in failure))
        await exchange.end()

    await watched(exchange, work(), ping)
