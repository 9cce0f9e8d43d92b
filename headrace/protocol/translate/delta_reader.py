"""Our own engine's answer: the deltas of one choice, read into events.

Delta(parts=(Reasoning("hm"),)), Delta(parts=(ToolCall(0, "c1", "f", "{}"),), finish_reason="tool_calls")
-> Begin, Open("thinking"), Piece("hm"), Close, Open("call"), Piece("{}"), Close, Stop("tool_calls"), Used, End
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from headrace.protocol import answers
from headrace.protocol.answers import AnswerHead, AnswerPart, Content, Delta, Reasoning, ToolCall
from headrace.protocol.translate.events import Begin, Close, End, Event, Open, Piece, Stop, StopReason, Usage, Used

_REASONS: dict[str, StopReason] = {"length": "length", "tool_calls": "tool_calls"}


class DeltaReader:
    """Reads the deltas of one answer."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._has_begun = False
        self._open: Literal["text", "thinking"] | None = None

    def read(self, delta: Delta, usage: answers.Usage) -> Iterable[Event]:
        """`usage`: all that was counted so far, this delta included."""
        if not self._has_begun:
            self._has_begun = True
            start = _usage(usage, output_tokens=0)
            yield Begin(self._head.id, self._head.model, self._head.created, start)
        parts: tuple[AnswerPart, ...] = delta.parts if delta.parts is not None else (Content(delta.text),)
        for part in parts:
            yield from self._part(part)
        if delta.finish_reason is not None:
            yield from self._close()
            yield _stop(delta)
            yield Used(_usage(usage, output_tokens=usage.completion_tokens))
            yield End()

    def _part(self, part: AnswerPart) -> Iterable[Event]:
        match part:
            case Content(text) if text:
                yield from self._text("text", text)
            case Reasoning(text) if text:
                yield from self._text("thinking", text)
            case ToolCall():
                yield from self._close()
                yield Open("call", part.id, part.name)
                yield Piece(part.arguments)
                yield Close()

    def _text(self, kind: Literal["text", "thinking"], text: str) -> Iterable[Event]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield Open(kind)
        yield Piece(text)

    def _close(self) -> Iterable[Event]:
        if self._open is not None:
            self._open = None
            yield Close()


def _stop(delta: Delta) -> Stop:
    if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
        return Stop("stop_sequence", delta.stop_reason)
    return Stop(_REASONS.get(delta.finish_reason or "", "stop"))


def _usage(usage: answers.Usage, *, output_tokens: int) -> Usage:
    return Usage(
        input_tokens=usage.prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )
