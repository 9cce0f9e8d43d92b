"""OpenAI chat completions, the answer as a client of that dialect reads it: chunks or whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.protocol.errors import ApiError
from headrace.protocol.translate.events import (
    Answer,
    Begin,
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
from headrace.protocol.translate.exchange import DONE, Exchange, Outgoing, no_usage
from headrace.protocol.translate.wire import Json

_REASONS: dict[StopReason, str] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "stop_sequence": "stop",
    "content_filter": "content_filter",
    "pause": "stop",
    "context_window": "length",
}
_FIELDS = {"text": "content", "thinking": "reasoning_content", "refusal": "refusal"}


class ChatWriter:
    """Writes the chunks of one stream: the role first, then deltas, the reason, and usage if it was asked for."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._head: Json = {}
        self._open = Open("text")
        self._num_calls = 0
        self._custom: list[str] = []
        self._stop = Stop("stop")
        self._usage = no_usage(exchange)

    def write(self, event: Event) -> Iterable[Outgoing]:
        match event:
            case Begin():
                self._head = _head(self._exchange, event, "chat.completion.chunk")
                yield self._chunk({"role": "assistant", "content": ""})
            case Open(kind="call"):
                self._open = event
                self._num_calls += 1
                origin = self._exchange.origin(event.name)
                if origin.custom:
                    self._custom = []
                else:
                    function = {"name": origin.name, "arguments": ""}
                    yield self._call({"id": event.id, "type": "function", "function": function})
            case Open():
                self._open = event
            case Piece() if self._open.kind == "call":
                if self._exchange.origin(self._open.name).custom:
                    self._custom.append(event.text)
                else:
                    yield self._call({"function": {"arguments": event.text}})
            case Piece():
                yield self._chunk({_FIELDS[self._open.kind]: event.text})
            case Close() if self._open.kind == "call":
                origin = self._exchange.origin(self._open.name)
                if origin.custom:
                    custom = {"name": origin.name, "input": custom_input("".join(self._custom))}
                    yield self._call({"id": self._open.id, "type": "custom", "custom": custom})
            case Stop():
                self._stop = event
            case Used():
                self._usage = event.usage
            case End():
                yield self._chunk({}, _reason(self._stop))
                if self._exchange.wants_usage:
                    yield Outgoing({**self._head, "choices": [], "usage": wire_usage(self._usage)})
                yield DONE

    def fail(self, error: ApiError) -> Iterable[Outgoing]:
        """The in-band error; no `[DONE]` follows, so that no client takes it for an end."""
        yield Outgoing({"error": error.payload()["error"]})

    def _call(self, call: Json) -> Outgoing:
        return self._chunk({"tool_calls": [{"index": self._num_calls - 1, **call}]})

    def _chunk(self, delta: Json, reason: Json | None = None) -> Outgoing:
        choice = {"index": 0, "delta": delta, "logprobs": None, **(reason or {"finish_reason": None})}
        chunk = {**self._head, "choices": [choice]}
        if self._exchange.wants_usage:
            chunk["usage"] = None
        return Outgoing(chunk)


def write_whole(answer: Answer, exchange: Exchange) -> Json:
    """Blocks of one kind are joined: this dialect has one text, one refusal and one reasoning an answer."""
    texts = {kind: "".join(block.text for block in answer.blocks if block.kind == kind) for kind in _FIELDS}
    message: Json = {"role": "assistant", "content": texts["text"], "refusal": texts["refusal"] or None}
    if texts["thinking"]:
        message["reasoning_content"] = texts["thinking"]
    calls = []
    for block in answer.blocks:
        if block.kind != "call":
            continue
        origin = exchange.origin(block.name)
        if origin.custom:
            custom = {"name": origin.name, "input": custom_input(block.text)}
            calls.append({"id": block.id, "type": "custom", "custom": custom})
        else:
            function = {"name": origin.name, "arguments": block.text}
            calls.append({"id": block.id, "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    body = _head(exchange, Begin(answer.id, answer.model, answer.created_s), "chat.completion")
    choice = {"index": 0, "message": message, "logprobs": None, **_reason(answer.stop)}
    return {**body, "choices": [choice], "usage": wire_usage(answer.usage or no_usage(exchange))}


def wire_usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def custom_input(arguments: str) -> str:
    """The free text of a tool that reached the model as a function with the one parameter `input`."""
    try:
        value: Any = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    free = value.get("input") if isinstance(value, dict) else None
    return free if isinstance(free, str) else arguments


def _head(exchange: Exchange, begin: Begin, shape: str) -> Json:
    return {
        "id": exchange.id(begin, "chatcmpl-"),
        "object": shape,
        "created": exchange.created(begin),
        "model": exchange.model,
    }


def _reason(stop: Stop) -> Json:
    """`stop_reason` names the stop string, as vLLM and our own engine do."""
    reason: Json = {"finish_reason": _REASONS[stop.reason]}
    if stop.sequence is not None:
        reason["stop_reason"] = stop.sequence
    return reason
