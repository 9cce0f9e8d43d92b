"""Anthropic messages, the answer as a client of that dialect reads it: events or whole."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.protocol.errors import ApiError
from headrace.protocol.translate import wire
from headrace.protocol.translate.events import (
    Answer,
    Begin,
    Block,
    Close,
    End,
    Event,
    Open,
    Piece,
    Stop,
    StopReason,
    Usage,
    Used,
)
from headrace.protocol.translate.exchange import Exchange, Outgoing, no_usage, typed
from headrace.protocol.translate.failures import anthropic_payload
from headrace.protocol.translate.signatures import signed_for
from headrace.protocol.translate.wire import Json

_REASONS: dict[StopReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "stop_sequence": "stop_sequence",
    "content_filter": "refusal",
    "pause": "pause_turn",
    "context_window": "model_context_window_exceeded",
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "refusal": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesWriter:
    """Writes the events of one stream."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._index = -1
        self._kind = "text"
        self._stop = Stop("stop")
        self._usage = no_usage(exchange)

    def write(self, event: Event) -> Iterable[Outgoing]:
        match event:
            case Begin():
                self._usage = event.usage or self._usage
                message = _message(self._exchange, event, [])
                yield typed({"type": "message_start", "message": {**message, "usage": wire_usage(self._usage)}})
            case Open():
                self._index += 1
                self._kind = event.kind
                block = _opened(event, self._exchange)
                yield typed({"type": "content_block_start", "index": self._index, "content_block": block})
            case Piece():
                shape, name = _DELTAS[self._kind]
                yield self._delta({"type": shape, name: event.text})
            case Close():
                signature = signed_for(event.signature, self._exchange.upstream, "messages")
                if signature is not None and self._kind == "thinking":
                    yield self._delta({"type": "signature_delta", "signature": signature})
                yield typed({"type": "content_block_stop", "index": self._index})
            case Stop():
                self._stop = event
            case Used():
                self._usage = event.usage
            case End():
                yield typed({"type": "message_delta", "delta": _stopped(self._stop), "usage": wire_usage(self._usage)})
                yield typed({"type": "message_stop"})

    def fail(self, error: ApiError) -> Iterable[Outgoing]:
        yield typed(anthropic_payload(error, self._exchange.request_id))

    def _delta(self, delta: Json) -> Outgoing:
        return typed({"type": "content_block_delta", "index": self._index, "delta": delta})


def write_whole(answer: Answer, exchange: Exchange) -> Json:
    content = [_whole(block, exchange) for block in answer.blocks]
    message = _message(exchange, Begin(answer.id, answer.model), content)
    return {**message, **_stopped(answer.stop), "usage": wire_usage(answer.usage or no_usage(exchange))}


def wire_usage(usage: Usage) -> Json:
    """`input_tokens` without what came from the cache or went into it; those have their own fields."""
    written: Json = {
        "input_tokens": max(0, usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens),
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }
    if usage.reasoning_tokens:
        written["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return written


def _message(exchange: Exchange, begin: Begin, content: list[Json]) -> Json:
    return {
        "id": exchange.id(begin, "msg_"),
        "type": "message",
        "role": "assistant",
        "model": exchange.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stopped(stop: Stop) -> Json:
    return {"stop_reason": _REASONS[stop.reason], "stop_sequence": stop.sequence}


def _opened(event: Open, exchange: Exchange) -> Json:
    match event.kind:
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "redacted":
            return {"type": "redacted_thinking", "data": event.data}
        case "call":
            return {"type": "tool_use", "id": event.id, "name": exchange.origin(event.name).name, "input": {}}
    return {"type": "text", "text": ""}


def _whole(block: Block, exchange: Exchange) -> Json:
    opened = _opened(Open(block.kind, block.id, block.name, block.data), exchange)
    match block.kind:
        case "thinking":
            signature = signed_for(block.signature, exchange.upstream, "messages") or ""
            return {**opened, "thinking": block.text, "signature": signature}
        case "redacted":
            return opened
        case "call":
            return {**opened, "input": wire.arguments_object(block.text)}
    return {**opened, "text": block.text}
