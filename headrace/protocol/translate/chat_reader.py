"""OpenAI chat completions, the answer as an upstream gives it: chunks or whole, read into events.

Forgiving where servers differ: `reasoning` or `reasoning_content`, content as parts, tool calls without ids or
indexes, the old `function_call`, usage anywhere. Strict in one thing: without a finish_reason it is no answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

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
    with_calls_as_reason,
)
from headrace.protocol.translate.failures import failure_in, invalid_answer
from headrace.protocol.translate.wire import Json

_REASONS: dict[str, StopReason] = {
    "stop": "stop",
    "length": "length",
    "max_tokens": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "stop_sequence": "stop_sequence",
}
_BROKEN = ("error", "abort", "network_error", "insufficient_system_resource")


class ChatReader:
    """Reads the chunks of one stream. `ids` names calls that the upstream left nameless."""

    def __init__(self, fallback_id: str) -> None:
        self._fallback_id = fallback_id
        self._blocks = Blocks()
        self._begun = False
        self._text_key: tuple[str, int] | None = None
        self._num_texts = 0
        self._calls: dict[int, int] = {}
        self._last_call: int | None = None
        self._num_calls = 0
        self.is_complete = False
        """A finish_reason has come; all that may follow is usage."""

    def feed(self, chunk: Json) -> Iterable[Event]:
        """What came before a failure is given first. Raises ApiError for an error in the stream."""
        return self._read(chunk)

    def end(self) -> list[Event]:
        """The stream said [DONE], or ended after it was complete."""
        return [End()]

    def _read(self, chunk: Json) -> Iterable[Event]:
        failure = failure_in(chunk)
        if failure is not None:
            raise failure
        choices = chunk.get("choices")
        if not self._begun and (choices or chunk.get("id")):
            self._begun = True
            yield begin_of(chunk, self._fallback_id)
        for choice in wire.told(choices):
            if not choice.get("index"):
                yield from self._choice(choice)
        usage = usage_of(chunk.get("usage"))
        if usage is not None:
            yield Used(usage)

    def _choice(self, choice: Json) -> Iterable[Event]:
        delta = choice.get("delta") or choice.get("message")
        delta = delta if isinstance(delta, dict) else {}
        for kind, text in _texts(delta):
            yield from self._text(kind, text)
        for call in _calls(delta):
            yield from self._call(call)
        reason = choice.get("finish_reason")
        if self.is_complete or reason:
            yield from self._blocks.close_all()
        if reason and not self.is_complete:
            self.is_complete = True
            yield stop_of(choice, bool(self._num_calls))

    def _text(self, kind: BlockKind, text: str) -> Iterable[Event]:
        if not text:
            return
        if self._text_key is None or self._text_key[0] != kind:
            self._num_texts += 1
            self._text_key = (kind, self._num_texts)
            yield from self._blocks.open(self._text_key, kind)
        yield from self._blocks.add(self._text_key, text)

    def _call(self, call: Json) -> Iterable[Event]:
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        id, name = str(call.get("id") or ""), str(function.get("name") or "")
        key = self._key(call.get("index"), id, name)
        if key is None:
            key = self._num_calls
            self._num_calls += 1
            index = call.get("index")
            self._calls[index if isinstance(index, int) else key] = key
            self._text_key = None
            yield from self._blocks.open(key, "call", id or f"call_{self._fallback_id}_{key}", name)
        elif name:
            yield from self._blocks.name(key, id, name)
        self._last_call = key
        arguments = function.get("arguments")
        if arguments is not None and arguments != "":
            yield from self._blocks.add(key, wire.arguments_text(arguments))

    def _key(self, index: object, id: str, name: str) -> int | None:
        """Which of the known calls a piece belongs to; None for a new one."""
        unindexed = None if name else self._last_call
        known = self._calls.get(index) if isinstance(index, int) else unindexed
        if known is not None and id and name and self._blocks.id_of(known) not in ("", id):
            return None
        return known


def read_whole(body: Json, fallback_id: str) -> Answer:
    """Raises ApiError: the error inside a 200, or 502 for an answer without choices."""
    failure = failure_in(body)
    if failure is not None:
        raise failure
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise invalid_answer("it has no `choices`.")
    choice = choices[0]
    message = choice.get("message")
    if not isinstance(message, dict):
        raise invalid_answer("its first choice has no `message`.")
    blocks: list[Block] = []
    for kind, text in _texts(message):
        if blocks and blocks[-1].kind == kind:
            blocks[-1] = Block(kind, blocks[-1].text + text)
        elif text:
            blocks.append(Block(kind, text))
    for place, call in enumerate(_calls(message)):
        function = call.get("function")
        if not isinstance(function, dict) or not function.get("name"):
            raise invalid_answer("a tool call has no name.")
        id = str(call.get("id") or f"call_{fallback_id}_{place}")
        arguments = wire.arguments_text(function.get("arguments"))
        blocks.append(Block("call", arguments if arguments.strip() else "{}", id, str(function["name"])))
    begin = begin_of(body, fallback_id)
    return Answer(
        id=begin.id,
        model=begin.model,
        created_s=begin.created_s,
        blocks=tuple(blocks),
        stop=stop_of(choice, any(block.kind == "call" for block in blocks)),
        usage=usage_of(body.get("usage")),
    )


def begin_of(body: Json, fallback_id: str) -> Begin:
    created = body.get("created")
    return Begin(
        str(body.get("id") or fallback_id),
        str(body.get("model") or ""),
        int(created) if isinstance(created, int | float) and created > 0 else None,
    )


def stop_of(choice: Json, has_calls: bool) -> Stop:
    """Raises ApiError when the reason is that the upstream failed."""
    reason = str(choice.get("finish_reason") or "stop")
    if reason in _BROKEN:
        raise invalid_answer(f"it ends with the reason `{reason}`.")
    sequence = choice.get("stop_reason")
    if reason == "stop" and isinstance(sequence, str):
        return with_calls_as_reason(Stop("stop_sequence", sequence), False)
    return with_calls_as_reason(Stop(_REASONS.get(reason, "stop")), has_calls)


def usage_of(usage: object) -> Usage | None:
    if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int | float):
        return None
    prompt, written = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    cached = wire.at(prompt, "cached_tokens")
    return Usage(
        input_tokens=wire.count(usage["prompt_tokens"]),
        output_tokens=wire.count(usage.get("completion_tokens")),
        cached_tokens=wire.count(usage.get("prompt_cache_hit_tokens") if cached is None else cached),
        cache_write_tokens=wire.count(wire.at(prompt, "cache_write_tokens")),
        reasoning_tokens=wire.count(wire.at(written, "reasoning_tokens")),
    )


def _texts(delta: Json) -> Iterator[tuple[BlockKind, str]]:
    """The texts of a delta or message by kind, in the order in which a model writes them."""
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(thought, str):
        yield "thinking", thought
    content: Any = delta.get("content")
    if isinstance(content, str):
        yield "text", content
    for part in wire.told(content):
        if isinstance(part.get("text"), str):
            yield "text", part["text"]
        inner = part.get("thinking")
        if isinstance(inner, str):
            yield "thinking", inner
        elif isinstance(inner, list):
            yield "thinking", "".join(str(piece.get("text") or "") for piece in wire.told(inner))
    refusal = delta.get("refusal")
    if isinstance(refusal, str):
        yield "refusal", refusal


def _calls(delta: Json) -> Iterator[Json]:
    yield from wire.told(delta.get("tool_calls"))
    old = delta.get("function_call")
    if isinstance(old, dict):
        yield {"index": 0, "function": old}
