"""An answer's deltas as reasoning, content and tool calls: each stage reads what the one before it left.

    Delta ──► ReasoningSplit ──► ToolParser ──► Delta with parts

A delta whose text is held back is not passed on; its tokens and scores go with the next one, as text is told late
and never twice.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.protocol.answers import AnswerPart, Content, Delta, Reasoning, ToolCall
from headrace.text.choice import joined
from headrace.text.reasoning import ReasoningFormat, ReasoningSplit
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_formats import ToolFormat
from headrace.text.tool_parser import Call, ToolParser

_LETTERS = string.ascii_letters + string.digits
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the answers of one request are read. `reasoning` None: no thinking is looked for; `tools` None: no calls.

    `is_thinking`: the prompt ends inside the thinking. `tells_reasoning` False leaves it out. `one_call`: an answer
    ends with its first call.
    """

    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False
    tells_reasoning: bool = True
    tools: ToolFormat | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of the arguments of each tool that may be called."""
    one_call: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        thinking = (self.reasoning.opens, self.reasoning.closes) if self.reasoning is not None else ()
        return (*thinking, *(self.tools.marks if self.tools is not None else ()))

    def kept_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The marks that are special tokens, which would not be in the text."""
        ids = (tokenizer.added_token_id(mark) for mark in self.marks)
        return frozenset(token_id for token_id in ids if token_id is not None and tokenizer.is_special(token_id))

    @property
    def is_plain(self) -> bool:
        """There is nothing to look for: all text is content."""
        return self.reasoning is None and self.tools is None


class AnswerParser:
    """One choice's deltas."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._split = (
            ReasoningSplit(reading.reasoning, is_open=reading.is_thinking) if reading.reasoning is not None else None
        )
        self._tools = ToolParser(reading.tools, reading.schemas) if reading.tools is not None else None
        self._waiting: list[Delta] = []
        self._thought_tokens = 0
        self._num_calls = 0
        self.is_over = False
        """The one call that was allowed is there: nothing more is to be generated."""

    def add(self, delta: Delta) -> Delta | None:
        """The delta with its parts, and what waited before it; None while its text is held back."""
        is_last = delta.finish_reason is not None
        thought = self._split is not None and self._split.is_thinking
        parts = self._parts(delta.text, is_last)
        if self._reading.one_call:
            first = next((place for place, part in enumerate(parts) if isinstance(part, ToolCall)), None)
            if first is not None:
                parts = parts[: first + 1]
                self.is_over = is_last = True
        self._waiting.append(delta)
        self._thought_tokens += len(delta.token_ids) if thought else 0
        if not parts and not is_last:
            return None
        whole = delta if len(self._waiting) == 1 else joined(self._waiting)
        self._waiting = []
        reason = "stop" if self.is_over and delta.finish_reason is None else whole.finish_reason
        if self._num_calls and reason == "stop":
            reason = "tool_calls"
        thought_tokens, self._thought_tokens = self._thought_tokens, 0
        return Delta(
            whole.index,
            whole.text,
            whole.token_ids,
            whole.tokens,
            reason,
            whole.stop_reason,
            whole.cached_tokens,
            parts=tuple(parts),
            reasoning_tokens=thought_tokens,
        )

    def _parts(self, text: str, is_last: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._split is None:
            self._read(parts, text)
        else:
            pieces = self._split.add(text) + (self._split.finish() if is_last else [])
            for kind, piece in pieces:
                if kind == "content":
                    self._read(parts, piece)
                elif self._reading.tells_reasoning:
                    parts.append(Reasoning(piece))
        if is_last and self._tools is not None:
            self._tell(parts, self._tools.finish())
        return parts

    def _read(self, parts: list[AnswerPart], text: str) -> None:
        if self._tools is not None:
            self._tell(parts, self._tools.add(text))
        elif text:
            parts.append(Content(text))

    def _tell(self, parts: list[AnswerPart], found: list[str | Call]) -> None:
        for part in found:
            if isinstance(part, str):
                parts.append(Content(part))
                continue
            assert self._reading.tools is not None
            call_id = new_call_id(self._reading.tools)
            parts.append(ToolCall(self._num_calls, call_id, part.name, part.arguments))
            self._num_calls += 1


def new_call_id(format: ToolFormat) -> str:
    """Never given before; of the length that the family's template wants."""
    return format.id_prefix + "".join(_random.choices(_LETTERS, k=format.id_chars))
