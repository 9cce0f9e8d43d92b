"""OpenAI responses, the answer as an upstream gives it: events or whole, read into ours.

An item's text may come in deltas, or only in its `done` event; what the deltas left out is taken from there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from headrace.protocol.translate import wire
from headrace.protocol.translate.blocks import Blocks
from headrace.protocol.translate.events import (
    Answer,
    Begin,
    Block,
    BlockKind,
    End,
    Event,
    Stop,
    Usage,
    Used,
    with_calls_as_reason,
)
from headrace.protocol.translate.failures import failure_in, failure_of, invalid_answer
from headrace.protocol.translate.wire import Json

_DELTAS: dict[str, tuple[BlockKind, str]] = {
    "response.output_text.delta": ("text", "content_index"),
    "response.refusal.delta": ("refusal", "content_index"),
    "response.reasoning_summary_text.delta": ("thinking", "summary_index"),
    "response.reasoning_text.delta": ("thinking", "content_index"),
}


class ResponsesReader:
    """Reads the events of one stream."""

    def __init__(self, fallback_id: str) -> None:
        self._fallback_id = fallback_id
        self._blocks = Blocks()
        self._thoughts: dict[int, Hashable] = {}
        self._has_calls = False
        self.is_complete = False

    def feed(self, event: Json) -> Iterable[Event]:
        """What came before a failure is given first. Raises ApiError for `error` and `response.failed`."""
        return self._read(event)

    def end(self) -> list[Event]:
        return []

    def _read(self, event: Json) -> Iterable[Event]:
        failure = failure_in(event)
        if failure is not None:
            raise failure
        shape = str(event.get("type"))
        item = event.get("output_index")
        item = item if isinstance(item, int) else -1
        match shape:
            case "response.created":
                response = event.get("response")
                yield begin_of(response if isinstance(response, dict) else {}, self._fallback_id)
            case "response.output_item.added":
                if wire.at(event, "item", "type") in ("function_call", "custom_tool_call"):
                    self._has_calls = True
                    id, name = (str(wire.at(event, "item", key) or "") for key in ("call_id", "name"))
                    yield from self._blocks.open(item, "call", id, name)
            case "response.function_call_arguments.delta" if item in self._blocks:
                yield from self._blocks.add(item, str(event.get("delta") or ""))
            case "response.output_item.done":
                yield from self._done(item, event.get("item"))
            case "response.completed" | "response.incomplete":
                self.is_complete = True
                yield from self._blocks.close_all()
                response = event.get("response")
                response = response if isinstance(response, dict) else {}
                yield stop_of(response, self._has_calls)
                usage = usage_of(response.get("usage"))
                if usage is not None:
                    yield Used(usage)
                yield End()
            case "response.failed":
                raise failure_of(None, {"error": wire.at(event, "response", "error") or {}})
            case _ if shape in _DELTAS:
                kind, place = _DELTAS[shape]
                key: Hashable = (item, kind, wire.count(event.get(place)))
                if key not in self._blocks:
                    yield from self._blocks.open(key, kind)
                    if kind == "thinking":
                        self._thoughts[item] = key
                yield from self._blocks.add(key, str(event.get("delta") or ""))

    def _done(self, index: int, item: object) -> Iterable[Event]:
        """Whatever of the item has not been told yet, and its end."""
        if not isinstance(item, dict):
            return
        for place, block in enumerate(_blocks(item)):
            key: Hashable
            if block.kind == "call":
                key = index
                if key not in self._blocks:
                    self._has_calls = True
                    yield from self._blocks.open(key, "call", block.id, block.name)
            elif block.kind == "thinking":
                key = self._thoughts.get(index, (index, "thinking", place))
            else:
                key = (index, block.kind, place)
            if key not in self._blocks:
                yield from self._blocks.open(key, block.kind, data=block.data)
            if not self._blocks.has_pieces(key):
                yield from self._blocks.add(key, block.text)
            if block.signature is not None:
                self._blocks.sign(key, block.signature)
            yield from self._blocks.close(key)


def read_whole(body: Json, fallback_id: str) -> Answer:
    """Raises ApiError: a failed response, the error inside a 200, or 502 for one without output."""
    if body.get("status") == "failed":
        raise failure_of(None, {"error": body.get("error") or {}})
    failure = failure_in(body)
    if failure is not None:
        raise failure
    output = body.get("output")
    if not isinstance(output, list):
        raise invalid_answer("it has no `output`.")
    blocks = tuple(block for item in output if isinstance(item, dict) for block in _blocks(item))
    begin = begin_of(body, fallback_id)
    return Answer(
        id=begin.id,
        model=begin.model,
        created_s=begin.created_s,
        blocks=blocks,
        stop=stop_of(body, any(block.kind == "call" for block in blocks)),
        usage=usage_of(body.get("usage")),
    )


def begin_of(body: Json, fallback_id: str) -> Begin:
    created = wire.count(body.get("created_at"))
    return Begin(str(body.get("id") or fallback_id), str(body.get("model") or ""), created or None)


def _blocks(item: Json) -> Iterator[Block]:
    match item.get("type"):
        case "message":
            for part in wire.told(item.get("content")):
                if part.get("type") == "refusal":
                    yield Block("refusal", str(part.get("refusal") or ""))
                elif part.get("type") == "output_text":
                    yield Block("text", str(part.get("text") or ""))
        case "function_call":
            arguments = wire.arguments_text(item.get("arguments"))
            yield Block("call", arguments, str(item.get("call_id") or ""), str(item.get("name") or ""))
        case "reasoning":
            parts = wire.told(item.get("summary")) or wire.told(item.get("content"))
            text = "".join(str(part.get("text") or "") for part in parts)
            sealed = item.get("encrypted_content")
            if text or sealed:
                yield Block("thinking", text, signature=str(sealed) if sealed else None)


def stop_of(response: Json, has_calls: bool) -> Stop:
    if response.get("status") == "incomplete":
        filtered = wire.at(response, "incomplete_details", "reason") == "content_filter"
        return Stop("content_filter" if filtered else "length")
    return with_calls_as_reason(Stop("stop"), has_calls)


def usage_of(usage: object) -> Usage | None:
    if not isinstance(usage, dict) or not isinstance(usage.get("input_tokens"), int | float):
        return None
    return Usage(
        input_tokens=wire.count(usage["input_tokens"]),
        output_tokens=wire.count(usage.get("output_tokens")),
        cached_tokens=wire.count(wire.at(usage, "input_tokens_details", "cached_tokens")),
        cache_write_tokens=wire.count(wire.at(usage, "input_tokens_details", "cache_write_tokens")),
        reasoning_tokens=wire.count(wire.at(usage, "output_tokens_details", "reasoning_tokens")),
    )
