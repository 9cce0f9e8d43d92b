"""Anthropic messages, the answer as an upstream gives it: events or whole, read into ours."""

from __future__ import annotations

from collections.abc import Iterable

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
    StopReason,
    Usage,
    Used,
)
from headrace.protocol.translate.failures import failure_in, invalid_answer
from headrace.protocol.translate.wire import Json

_KINDS: dict[str, BlockKind] = {
    "text": "text",
    "thinking": "thinking",
    "redacted_thinking": "redacted",
    "tool_use": "call",
}
_REASONS: dict[str, StopReason] = {
    "end_turn": "stop",
    "max_tokens": "length",
    "stop_sequence": "stop_sequence",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "pause_turn": "pause",
    "model_context_window_exceeded": "context_window",
}


class MessagesReader:
    """Reads the events of one stream."""

    def __init__(self, fallback_id: str) -> None:
        self._fallback_id = fallback_id
        self._blocks = Blocks()
        self._usage: Json = {}
        self._inputs: dict[int, Json] = {}
        self._stopped = False
        self.is_complete = False
        """A stop_reason has come: with or without message_stop, the answer is whole."""

    def feed(self, event: Json) -> Iterable[Event]:
        """What came before a failure is given first. Raises ApiError for an `error` event."""
        return self._read(event)

    def end(self) -> list[Event]:
        """The stream ended after it was complete, and had no message_stop."""
        return [] if self._stopped else [End()]

    def _read(self, event: Json) -> Iterable[Event]:
        failure = failure_in(event)
        if failure is not None:
            raise failure
        index = event.get("index")
        index = index if isinstance(index, int) else -1
        match event.get("type"):
            case "message_start":
                message = event.get("message")
                message = message if isinstance(message, dict) else {}
                self._note_usage(message.get("usage"))
                id, model = str(message.get("id") or self._fallback_id), str(message.get("model") or "")
                yield Begin(id, model, None, usage_of(self._usage))
            case "content_block_start":
                yield from self._start(index, event.get("content_block"))
            case "content_block_delta" if index in self._blocks:
                yield from self._delta(index, event.get("delta"))
            case "content_block_stop" if index in self._blocks:
                started = self._inputs.pop(index, None)
                if started and not self._blocks.has_pieces(index):
                    yield from self._blocks.add(index, wire.arguments_text(started))
                yield from self._blocks.close(index)
            case "message_delta":
                self._note_usage(event.get("usage"))
                reason = wire.at(event, "delta", "stop_reason")
                if reason and not self.is_complete:
                    self.is_complete = True
                    yield from self._blocks.close_all()
                    yield _stop(event["delta"])
                usage = usage_of(self._usage)
                if usage is not None:
                    yield Used(usage)
            case "message_stop":
                if not self.is_complete:
                    self.is_complete = True
                    yield from self._blocks.close_all()
                    yield Stop("stop")
                self._stopped = True
                yield End()

    def _start(self, index: int, block: object) -> Iterable[Event]:
        if not isinstance(block, dict):
            return
        kind = _KINDS.get(str(block.get("type")))
        if kind is None:
            return
        id, name, data = (str(block.get(key) or "") for key in ("id", "name", "data"))
        yield from self._blocks.open(index, kind, id, name, data)
        if kind == "call":
            if isinstance(block.get("input"), dict) and block["input"]:
                self._inputs[index] = block["input"]
        else:
            text = block.get("thinking") if kind == "thinking" else block.get("text")
            yield from self._blocks.add(index, text if isinstance(text, str) else "")
        if block.get("signature"):
            self._blocks.sign(index, str(block["signature"]))

    def _delta(self, index: int, delta: object) -> Iterable[Event]:
        for name in ("text", "thinking", "partial_json"):
            text = wire.at(delta, name) if isinstance(delta, dict) else None
            if isinstance(text, str):
                yield from self._blocks.add(index, text)
        signature = wire.at(delta, "signature") if isinstance(delta, dict) else None
        if isinstance(signature, str) and signature:
            self._blocks.sign(index, signature)

    def _note_usage(self, usage: object) -> None:
        """Counts are totals so far: later ones replace earlier ones, absent ones leave them."""
        if isinstance(usage, dict):
            self._usage |= {name: value for name, value in usage.items() if value is not None}


def read_whole(body: Json, fallback_id: str) -> Answer:
    """Raises ApiError: the error inside a 200, or 502 for an answer without content."""
    failure = failure_in(body)
    if failure is not None:
        raise failure
    content = body.get("content")
    if not isinstance(content, list):
        raise invalid_answer("it has no `content`.")
    blocks = [block for block in map(_block, wire.told(content)) if block is not None]
    return Answer(
        id=str(body.get("id") or fallback_id),
        model=str(body.get("model") or ""),
        created_s=None,
        blocks=tuple(blocks),
        stop=_stop(body),
        usage=usage_of(body.get("usage")),
    )


def _block(block: Json) -> Block | None:
    kind = _KINDS.get(str(block.get("type")))
    match kind:
        case None:
            return None
        case "call":
            arguments = wire.arguments_text(block.get("input"))
            return Block(kind, arguments, str(block.get("id") or ""), str(block.get("name") or ""))
        case "redacted":
            return Block(kind, data=str(block.get("data") or ""))
        case "thinking":
            signature = str(block.get("signature") or "")
            return Block(kind, str(block.get("thinking") or ""), signature=signature or None)
    return Block(kind, str(block.get("text") or ""))


def _stop(told: Json) -> Stop:
    sequence = told.get("stop_sequence")
    return Stop(_REASONS.get(str(told.get("stop_reason")), "stop"), sequence if isinstance(sequence, str) else None)


def usage_of(usage: object) -> Usage | None:
    """Anthropic counts the cached part of the prompt apart from `input_tokens`; we count it in."""
    if not isinstance(usage, dict) or not isinstance(usage.get("input_tokens"), int | float):
        return None
    cached, written = (
        wire.count(usage.get(name)) for name in ("cache_read_input_tokens", "cache_creation_input_tokens")
    )
    return Usage(
        input_tokens=wire.count(usage["input_tokens"]) + cached + written,
        output_tokens=wire.count(usage.get("output_tokens")),
        cached_tokens=cached,
        cache_write_tokens=written,
        reasoning_tokens=wire.count(wire.at(usage, "output_tokens_details", "thinking_tokens")),
    )
