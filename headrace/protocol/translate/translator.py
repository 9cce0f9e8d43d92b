"""The three calls the gateway makes: a request, a whole answer, a stream, from one dialect to another.

    sent = translate_request(body, client="messages", upstream="chat", model="qwen", ...)
    stream = StreamTranslator(sent.exchange)
    for piece in upstream: send(stream.feed(piece))      # bytes in any pieces -> Outgoing events
    send(stream.finish())

Everything here is a function of its inputs: no clock, no randomness, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from headrace.protocol import errors
from headrace.protocol.errors import ApiError
from headrace.protocol.sse_reader import EventTooLong, ServerEvent, SseReader
from headrace.protocol.translate import (
    chat_reader,
    chat_request,
    chat_writer,
    messages_reader,
    messages_request,
    messages_writer,
    responses_reader,
    responses_request,
    responses_writer,
)
from headrace.protocol.translate.conversation import Conversation
from headrace.protocol.translate.events import (
    Answer,
    Begin,
    Dialect,
    End,
    Event,
    Open,
    Piece,
    Usage,
    Used,
    estimated_tokens,
    events_of,
)
from headrace.protocol.translate.exchange import Exchange, Outgoing
from headrace.protocol.translate.failures import failure_of, invalid_answer, stream_truncated
from headrace.protocol.translate.habits import UpstreamHabits, habits_of
from headrace.protocol.translate.wire import Json

ECHOED = (
    "instructions max_output_tokens metadata parallel_tool_calls reasoning temperature text tool_choice tools top_p "
    "truncation user"
).split()
"""Fields of a responses request that its answer repeats."""

_READ_REQUEST: dict[Dialect, Callable[[Json], Conversation]] = {
    "chat": chat_request.read,
    "messages": messages_request.read,
    "responses": responses_request.read,
}
_READ_WHOLE: dict[Dialect, Callable[[Json, str], Answer]] = {
    "chat": chat_reader.read_whole,
    "messages": messages_reader.read_whole,
    "responses": responses_reader.read_whole,
}
_WRITE_WHOLE: dict[Dialect, Callable[[Answer, Exchange], Json]] = {
    "chat": chat_writer.write_whole,
    "messages": messages_writer.write_whole,
    "responses": responses_writer.write_whole,
}


class _Reader(Protocol):
    is_complete: bool

    def feed(self, event: Json) -> Iterable[Event]: ...

    def end(self) -> Iterable[Event]: ...


class _Writer(Protocol):
    def write(self, event: Event) -> Iterable[Outgoing]: ...

    def fail(self, error: ApiError) -> Iterable[Outgoing]: ...


_READERS: dict[Dialect, Callable[[str], _Reader]] = {
    "chat": chat_reader.ChatReader,
    "messages": messages_reader.MessagesReader,
    "responses": responses_reader.ResponsesReader,
}
_WRITERS: dict[Dialect, Callable[[Exchange], _Writer]] = {
    "chat": chat_writer.ChatWriter,
    "messages": messages_writer.MessagesWriter,
    "responses": responses_writer.ResponsesWriter,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedRequest:
    """`body` for the upstream; `dropped`: fields of the client's that have no effect, for a warning header."""

    body: Json
    dropped: tuple[str, ...]
    exchange: Exchange


def translate_request(
    body: Mapping[str, Any],
    *,
    client: Dialect,
    upstream: Dialect,
    model: str,
    upstream_model: str,
    request_id: str,
    created_s: int,
    prompt_tokens: int = 0,
    habits: UpstreamHabits | None = None,
    continues: bool = False,
) -> TranslatedRequest:
    """`model`: as the client named it (the answer carries it). `prompt_tokens`: an estimate, shown until the upstream
    counts. `habits` None: those that the upstream model's name suggests. `continues`: a chat upstream can go on with an
    answer that the client has begun. Raises ApiError (400) naming the field that
    is malformed or that the upstream has no words for."""
    conversation = read_request(body, client)
    known = habits if habits is not None else habits_of(upstream_model)
    match upstream:
        case "chat":
            sent, dropped = chat_request.write(
                conversation,
                model=upstream_model,
                max_tokens_field=known.max_tokens_field,
                takes_effort=known.takes_effort,
                continues=continues,
            )
        case "messages":
            sent, dropped = messages_request.write(
                conversation,
                model=upstream_model,
                default_max_tokens=known.default_max_tokens,
                style=known.thinking,
                takes_sampling=known.takes_sampling,
            )
        case "responses":
            sent, dropped = responses_request.write(conversation, model=upstream_model)
    options = body.get("stream_options")
    exchange = Exchange(
        client=client,
        upstream=upstream,
        model=model,
        request_id=request_id,
        created_s=created_s,
        stream=conversation.stream,
        wants_usage=client == "chat" and isinstance(options, dict) and bool(options.get("include_usage")),
        prompt_tokens=prompt_tokens,
        origins=conversation.origins,
        echo={name: body[name] for name in ECHOED if body.get(name) is not None} if client == "responses" else {},
    )
    return TranslatedRequest(body=sent, dropped=dropped, exchange=exchange)


def read_request(body: Mapping[str, Any], client: Dialect) -> Conversation:
    """A client's body, checked and understood, without an upstream: what counting its tokens needs."""
    conversation = _READ_REQUEST[client](dict(body))
    _check_choice(conversation)
    return conversation


def _check_choice(conversation: Conversation) -> None:
    """Raises ApiError (400) where a call is demanded of a tool that is not there, or that is not the client's own."""
    choice = conversation.tool_choice
    if choice is None:
        return
    if choice.mode == "named" and all(tool.name != choice.name for tool in conversation.tools):
        message = f"`tool_choice` names the tool `{choice.name}`, which `tools` lacks."
        raise errors.invalid_value("tool_choice", message)
    if choice.mode == "required" and not conversation.tools:
        message = "`tool_choice` demands a call, but `tools` has no tool of the client's own that could be called."
        raise errors.invalid_value("tool_choice", message)


@dataclass(frozen=True, slots=True)
class TranslatedAnswer:
    """`usage` is estimated where the upstream reported none."""

    body: Json
    usage: Usage


def translate_answer(body: bytes, exchange: Exchange) -> TranslatedAnswer:
    """The body of an upstream's 200. Raises ApiError for an error inside it and for what is no answer (502)."""
    answer = _whole_answer(body, exchange)
    usage = answer.usage or _estimate(exchange, sum(len(block.text.encode()) for block in answer.blocks))
    return TranslatedAnswer(_WRITE_WHOLE[exchange.client](replace(answer, usage=usage), exchange), usage)


def _whole_answer(body: bytes, exchange: Exchange) -> Answer:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        raise invalid_answer("it is not JSON." if body.strip() else "it is empty.") from None
    if not isinstance(found, dict):
        raise invalid_answer("it is not a JSON object.")
    return _READ_WHOLE[exchange.upstream](found, exchange.request_id)


def _estimate(exchange: Exchange, num_bytes: int) -> Usage:
    tokens = estimated_tokens(num_bytes)
    return Usage(input_tokens=exchange.prompt_tokens, output_tokens=tokens, estimated=True)


class StreamTranslator:
    """One stream. It never raises: a failure becomes the client's in-band error and `error`; what comes after is
    ignored. While `has_content` is False nothing that matters was said, and another upstream can still be tried."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._sse = SseReader()
        self._reader = _READERS[exchange.upstream](exchange.request_id)
        self._writer = _WRITERS[exchange.client](exchange)
        self._reported: Usage | None = None
        self._num_bytes = 0
        self._begun = False
        self._is_whole = False
        """The upstream sent its answer in one piece."""
        self.error: ApiError | None = None
        self.has_content = False
        """Text, thinking or a tool call was passed on, or the answer ended without any."""
        self.is_done = False
        """The client's stream has its last event, be it the end or the error."""

    @property
    def usage(self) -> Usage:
        """What is known of the tokens now; estimated until the upstream reports."""
        estimate = _estimate(self._exchange, self._num_bytes)
        reported = self._reported or estimate
        if (self._reader.is_complete or self._is_whole) and (reported.output_tokens or not self._num_bytes):
            return reported
        # What an upstream says before its end counts the output so far at best, and most say 0 or 1.
        output_tokens = max(reported.output_tokens, estimate.output_tokens)
        return replace(reported, output_tokens=output_tokens, estimated=True)

    def feed(self, piece: bytes) -> list[Outgoing]:
        """Bytes of the upstream's stream."""
        if self.is_done:
            return []
        try:
            found = self._sse.feed(piece)
        except EventTooLong as problem:
            return self.fail(invalid_answer(f"{problem}."))
        return [outgoing for event in found for outgoing in self.feed_event(event)]

    def feed_event(self, event: ServerEvent) -> list[Outgoing]:
        if self.is_done:
            return []
        if event.data.strip() == "[DONE]":
            return self._pass_on(self._reader.end) if self._reader.is_complete else self.fail(stream_truncated())
        try:
            data = msgspec.json.decode(event.data)
        except (msgspec.DecodeError, RecursionError):
            return self.fail(invalid_answer("an event of its stream is not JSON."))
        if not isinstance(data, dict):
            return self.fail(invalid_answer("an event of its stream is not a JSON object."))
        if event.name == "error" and not data.get("error"):
            return self.fail(failure_of(None, data))
        return self._pass_on(lambda: self._reader.feed(data))

    def feed_answer(self, body: bytes) -> list[Outgoing]:
        """The whole answer of an upstream that was asked for a stream and gave none."""
        self._is_whole = True
        return self._pass_on(lambda: events_of(_whole_answer(body, self._exchange)))

    def finish(self) -> list[Outgoing]:
        """The upstream closed its stream. Cut before its end, that is an error (502 upstream_stream_truncated)."""
        sent: list[Outgoing] = []
        for event in self._sse.finish():
            if self._is_cut(event):
                break
            sent += self.feed_event(event)
        if not self.is_done:
            sent += self._pass_on(self._reader.end) if self._reader.is_complete else self.fail(stream_truncated())
        return sent

    def fail(self, error: ApiError) -> list[Outgoing]:
        """End the client's stream with an error; nothing more is said after it."""
        if self.is_done:
            return []
        self.error = error
        self.is_done = True
        return list(self._writer.fail(error))

    def _is_cut(self, event: ServerEvent) -> bool:
        """The last event lacks its end, and its data too."""
        try:
            return event.data.strip() != "[DONE]" and msgspec.json.decode(event.data) is None
        except (msgspec.DecodeError, RecursionError):
            return True

    def _pass_on(self, read: Callable[[], Iterable[Event]]) -> list[Outgoing]:
        sent: list[Outgoing] = []
        try:
            for event in read():
                sent.extend(self._write(event))
        except ApiError as error:
            sent += self.fail(error)
        return sent

    def _write(self, event: Event) -> Iterable[Outgoing]:
        if not self._begun:
            self._begun = True
            if not isinstance(event, Begin):
                yield from self._writer.write(Begin(self._exchange.request_id, ""))
        match event:
            case Begin():
                self._reported = event.usage
            case Open(kind="call" | "redacted"):
                self.has_content = True
            case Piece():
                self.has_content = True
                self._num_bytes += len(event.text.encode())
            case Used():
                self._reported = event.usage
            case End():
                self.has_content = True
                if self.usage.estimated:
                    yield from self._writer.write(Used(self.usage))
                self.is_done = True
        yield from self._writer.write(event)
