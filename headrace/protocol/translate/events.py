"""What passes between dialects: an answer as a series of events, and the same answer as one value.

Every dialect is read into these events and written from them, so three dialects need three readers and three
writers, not nine translators. An answer is a row of blocks (text, thinking, tool calls) that never overlap:

    Begin(...) Open("thinking") Piece("hm") Close() Open("call", id="c1", name="f") Piece('{"a":') Piece("1}") Close()
    Stop("tool_calls") Used(Usage(...)) End()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

Dialect = Literal["chat", "messages", "responses"]
"""OpenAI chat completions, Anthropic messages, OpenAI responses."""

BlockKind = Literal["text", "refusal", "thinking", "redacted", "call"]

StopReason = Literal["stop", "length", "tool_calls", "stop_sequence", "content_filter", "pause", "context_window"]

BYTES_PER_TOKEN = 3.6
"""Measured over English prose and code; good for an estimate, and only where an upstream reports nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer. `input_tokens` counts all of the prompt, cached or not; `output_tokens` all that was
    generated, thinking included. `estimated`: nobody reported them, they were derived from the text's length."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Begin:
    """`id` and `model` as the upstream names them; `created_s` in Unix seconds, None where it does not say.
    `input_tokens`: what is already known of the usage."""

    id: str
    model: str
    created_s: int | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """A block begins. `id` and `name` belong to tool calls, `data` to redacted thinking."""

    kind: BlockKind
    id: str = ""
    name: str = ""
    data: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of the open block; of a tool call, a piece of its arguments as JSON text. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Close:
    """The open block ends. `signature` vouches for a thinking block to whoever made it."""

    signature: str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Why generation ended. `sequence`: the stop string it met."""

    reason: StopReason
    sequence: str | None = None


@dataclass(frozen=True, slots=True)
class Used:
    usage: Usage


@dataclass(frozen=True, slots=True)
class End:
    """The upstream said that this was all. Without it a stream is truncated."""


Event = Begin | Open | Piece | Close | Stop | Used | End


@dataclass(frozen=True, slots=True)
class Block:
    """A whole block; the fields of Open, the joined pieces, the signature of Close."""

    kind: BlockKind
    text: str = ""
    id: str = ""
    name: str = ""
    data: str = ""
    signature: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer. `usage` None: not reported."""

    id: str
    model: str
    created_s: int | None
    blocks: tuple[Block, ...]
    stop: Stop
    usage: Usage | None


def events_of(answer: Answer) -> Iterator[Event]:
    """The answer as the events of a stream, a block's text in one piece."""
    yield Begin(answer.id, answer.model, answer.created_s, answer.usage)
    for block in answer.blocks:
        yield Open(block.kind, block.id, block.name, block.data)
        if block.text:
            yield Piece(block.text)
        yield Close(block.signature)
    yield answer.stop
    if answer.usage is not None:
        yield Used(answer.usage)
    yield End()


def answer_of(events: Iterable[Event]) -> Answer:
    """What a finished stream said, as one value: the inverse of `events_of`."""
    begin = Begin("", "")
    stop = Stop("stop")
    usage: Usage | None = None
    blocks: list[Block] = []
    pieces: list[str] = []
    opened = Open("text")
    for event in events:
        match event:
            case Begin():
                begin = event
            case Open():
                opened, pieces = event, []
            case Piece():
                pieces.append(event.text)
            case Close():
                text = "".join(pieces)
                blocks.append(Block(opened.kind, text, opened.id, opened.name, opened.data, event.signature))
            case Stop():
                stop = event
            case Used():
                usage = event.usage
            case End():
                pass
    return Answer(
        id=begin.id, model=begin.model, created_s=begin.created_s, blocks=tuple(blocks), stop=stop, usage=usage
    )


def estimated_tokens(num_bytes: int) -> int:
    """About how many tokens so many bytes of UTF-8 text are; at least one for any text."""
    return 0 if num_bytes == 0 else max(1, round(num_bytes / BYTES_PER_TOKEN))


def with_calls_as_reason(stop: Stop, has_calls: bool) -> Stop:
    """Servers say `stop` after a forced tool call; who ran tools only on `tool_calls` would wait for ever."""
    return replace(stop, reason="tool_calls") if has_calls and stop.reason == "stop" else stop
