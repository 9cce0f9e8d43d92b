"""OpenAI responses, the answer as a client of that dialect (Codex) reads it: typed events or whole.

    response.created, response.in_progress,
      per item: output_item.added, its parts or arguments in deltas and `done`s, output_item.done,
    response.completed with `usage` and `output`; response.incomplete when cut by a limit, response.failed on errors.

`sequence_number` counts from 0. The whole answer is the stream's last event, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.protocol.errors import ApiError
from headrace.protocol.translate.chat_writer import custom_input
from headrace.protocol.translate.events import (
    Answer,
    Begin,
    Close,
    End,
    Event,
    Open,
    Piece,
    Stop,
    Usage,
    Used,
    events_of,
)
from headrace.protocol.translate.exchange import Exchange, Outgoing, no_usage, typed
from headrace.protocol.translate.failures import responses_error
from headrace.protocol.translate.signatures import signed_for
from headrace.protocol.translate.wire import Json

_ITEM_PREFIX = {"text": "msg", "refusal": "msg", "thinking": "rs", "redacted": "rs", "call": "fc"}
_ECHOED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that the response repeats, with what stands there when they were absent."""


class ResponsesWriter:
    """Writes the events of one stream."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._begin: Begin | None = None
        self._sequence = 0
        self._output: list[Json] = []
        self._open = Open("text")
        self._item_id = ""
        self._pieces: list[str] = []
        self._stop = Stop("stop")
        self._usage = no_usage(exchange)

    def write(self, event: Event) -> Iterable[Outgoing]:
        match event:
            case Begin():
                yield from self._start(event)
            case Open():
                self._open, self._pieces = event, []
                suffix = self._exchange.id(self._begin or Begin(self._exchange.request_id, ""), "")
                self._item_id = f"{_ITEM_PREFIX[event.kind]}_{suffix}_{len(self._output)}"
                yield self._item_event("response.output_item.added", self._item("in_progress", None))
                yield from self._opened()
            case Piece():
                self._pieces.append(event.text)
                yield from self._piece(event.text)
            case Close():
                item = self._item("completed", event.signature)
                yield from self._closed("".join(self._pieces))
                yield self._item_event("response.output_item.done", item)
                self._output.append(item)
            case Stop():
                self._stop = event
            case Used():
                self._usage = event.usage
            case End():
                status = "incomplete" if self._incomplete_details() else "completed"
                yield self._event(f"response.{status}", response=self._response(status))

    def fail(self, error: ApiError) -> Iterable[Outgoing]:
        """Clients want to have seen `response.created` before anything else."""
        if self._begin is None:
            yield from self._start(Begin(self._exchange.request_id, ""))
        response = {**self._response("failed"), "error": responses_error(error)}
        yield self._event("response.failed", response=response)

    def _start(self, begin: Begin) -> Iterable[Outgoing]:
        self._begin = begin
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    # a block's events

    def _opened(self) -> Iterable[Outgoing]:
        match self._open.kind:
            case "text" | "refusal":
                yield self._part_event("response.content_part.added", "")
            case "thinking":
                part = {"type": "summary_text", "text": ""}
                yield self._about("response.reasoning_summary_part.added", summary_index=0, part=part)

    def _piece(self, text: str) -> Iterable[Outgoing]:
        match self._open.kind:
            case "text":
                yield self._about("response.output_text.delta", content_index=0, delta=text, logprobs=[])
            case "refusal":
                yield self._about("response.refusal.delta", content_index=0, delta=text)
            case "thinking":
                yield self._about("response.reasoning_summary_text.delta", summary_index=0, delta=text)
            case "call" if not self._exchange.origin(self._open.name).custom:
                yield self._about("response.function_call_arguments.delta", delta=text)

    def _closed(self, text: str) -> Iterable[Outgoing]:
        match self._open.kind:
            case "text":
                yield self._about("response.output_text.done", content_index=0, text=text, logprobs=[])
                yield self._part_event("response.content_part.done", text)
            case "refusal":
                yield self._about("response.refusal.done", content_index=0, refusal=text)
                yield self._part_event("response.content_part.done", text)
            case "thinking":
                yield self._about("response.reasoning_summary_text.done", summary_index=0, text=text)
                part = {"type": "summary_text", "text": text}
                yield self._about("response.reasoning_summary_part.done", summary_index=0, part=part)
            case "call":
                if self._exchange.origin(self._open.name).custom:
                    free = custom_input(text)
                    yield self._about("response.custom_tool_call_input.delta", delta=free)
                    yield self._about("response.custom_tool_call_input.done", input=free)
                else:
                    name = self._exchange.origin(self._open.name).name
                    yield self._about("response.function_call_arguments.done", name=name, arguments=text)

    def _item(self, status: str, signature: str | None) -> Json:
        """The open item as it stands: empty when it begins, whole when it ends."""
        text = "".join(self._pieces)
        done = status == "completed"
        match self._open.kind:
            case "text" | "refusal":
                content = [self._part(text)] if done else []
                message: Json = {"id": self._item_id, "type": "message", "role": "assistant", "status": status}
                return {**message, "content": content}
            case "thinking" | "redacted":
                summary = [{"type": "summary_text", "text": text}] if done and self._open.kind == "thinking" else []
                sealed = signed_for(signature, self._exchange.upstream, "responses")
                if self._open.kind == "redacted":
                    sealed = f"redacted.{self._open.data}"
                return {"id": self._item_id, "type": "reasoning", "summary": summary, "encrypted_content": sealed}
        origin = self._exchange.origin(self._open.name)
        named: Json = {"call_id": self._open.id, "name": origin.name}
        if origin.namespace is not None:
            named["namespace"] = origin.namespace
        if origin.custom:
            said = {"input": custom_input(text) if done else ""}
            return {"id": self._item_id, "type": "custom_tool_call", "status": status, **named, **said}
        return {"id": self._item_id, "type": "function_call", "status": status, **named, "arguments": text}

    def _part(self, text: str) -> Json:
        if self._open.kind == "refusal":
            return {"type": "refusal", "refusal": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _part_event(self, shape: str, text: str) -> Outgoing:
        return self._about(shape, content_index=0, part=self._part(text))

    def _about(self, shape: str, **fields: object) -> Outgoing:
        return self._event(shape, item_id=self._item_id, output_index=len(self._output), **fields)

    def _item_event(self, shape: str, item: Json) -> Outgoing:
        return self._event(shape, output_index=len(self._output), item=item)

    def _event(self, shape: str, **fields: object) -> Outgoing:
        event = typed({"type": shape, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return event

    # the response itself

    def _response(self, status: str) -> Json:
        exchange, begin = self._exchange, self._begin or Begin(self._exchange.request_id, "")
        echo = {name: exchange.echo.get(name, absent) for name, absent in _ECHOED.items()}
        ended = status in ("completed", "incomplete")
        return {
            "id": exchange.id(begin, "resp_"),
            "object": "response",
            "created_at": exchange.created(begin),
            "status": status,
            "background": bool(exchange.echo.get("background")),
            "error": None,
            "incomplete_details": self._incomplete_details() if ended else None,
            "model": exchange.model,
            "output": list(self._output),
            **echo,
            "usage": wire_usage(self._usage) if ended else None,
        }

    def _incomplete_details(self) -> Json | None:
        match self._stop.reason:
            case "length" | "context_window":
                return {"reason": "max_output_tokens"}
            case "content_filter" if not any(block["type"] == "message" for block in self._output):
                return {"reason": "content_filter"}
        return None


def write_whole(answer: Answer, exchange: Exchange) -> Json:
    writer = ResponsesWriter(exchange)
    last: Json = {}
    for event in events_of(answer):
        for outgoing in writer.write(event):
            last = dict(outgoing.data or {})
    response: Json = last["response"]
    return response


def wire_usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
