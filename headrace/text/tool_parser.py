"""From an answer's text, as it comes, to content and tool calls: one parser for every format (tool_formats.py).

    "Let me look. <tool_call>{"name": "f"}</tool_call>"  ->  "Let me look.", Call("f", "{}")

What may become a call is held back until it is one, or cannot be one any more. So a call is told when it is whole and
its arguments are known to be JSON; what is none is content, to the last character. White space between a call and
whatever comes before it, and after the last one, belongs to the format and is dropped. The result does not depend on
how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.text import call_syntax
from headrace.text.call_syntax import TAGGED_END, TAGGED_START, RawCall, Span
from headrace.text.tool_formats import ToolFormat

MAX_HEAD_CHARS = 400
"""A name that takes longer to come is none."""
MAX_BROKEN_CALLS = 16
"""After so many marks without a call behind them, an answer's text is no longer looked at."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """The text of a JSON object."""


Part = str | Call


@dataclass(frozen=True, slots=True)
class _Found:
    """Calls, and the place after them."""

    calls: list[RawCall]
    end: int


class ToolParser:
    """The calls of one answer. `tools` are the request's, with the schemas of their arguments; a format whose calls are
    marked takes other names too, so that the client can tell the model that there is no such tool."""

    def __init__(self, format: ToolFormat, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._format = format
        self._tools = tools
        self._opener = re.compile("|".join(map(re.escape, format.opens))) if format.opens else None
        self._marks = (*format.opens, *format.around)
        self._firsts = frozenset(mark[0] for mark in self._marks)
        self._longest = max(map(len, self._marks), default=1)
        self._held = ""
        """Not told yet. While a call is read, the text from after `_before` on."""
        self._before: str | None = None
        """What led to the call being read: content again if it is none. None while none is read."""
        self._span: Span | None = None
        self._closes: list[str] | None = None
        """After a call: the marks that may still follow it. None elsewhere."""
        self._is_start = True
        self._has_text = False
        self._num_broken = 0

    def add(self, text: str) -> list[Part]:
        self._held += text
        return self._advance(final=False)

    def finish(self) -> list[Part]:
        """The rest; the parser is spent."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            if self._before is not None:
                is_settled = self._read_call(parts, final)
            elif self._closes is not None:
                is_settled = self._read_after(final)
            else:
                is_settled = self._read_content(parts, final)
            if not is_settled:
                return parts

    # each of these returns whether there is more to read

    def _read_content(self, parts: list[Part], final: bool) -> bool:
        held = self._held
        if self._num_broken >= MAX_BROKEN_CALLS:
            self._say(parts, held)
            return False
        if self._is_start and self._format.bare:
            bare = held.lstrip()
            if not bare and not final:
                return False
            if bare[:1] in ("{", "[") and bare:
                self._begin_call(held[: len(held) - len(bare)], bare)
                return True
        found = self._opener.search(held) if self._opener is not None else None
        if found is not None:
            lead = self._lead(held, found.start())
            self._say(parts, held[:lead])
            self._begin_call(held[lead : found.end()], held[found.end() :])
            return True
        keep = len(held) if final else self._lead(held, len(held) - self._partial(held))
        self._say(parts, held[:keep], held[keep:])
        return False

    def _begin_call(self, before: str, rest: str) -> None:
        self._before, self._held, self._span = before, rest, None
        self._is_start = False

    def _say(self, parts: list[Part], text: str, rest: str = "") -> None:
        self._held = rest
        if text:
            self._is_start, self._has_text = False, True
            parts.append(text)

    def _lead(self, held: str, end: int) -> int:
        """Where the white space and the marks begin that end at `end`: they belong to a call, if one comes."""
        while True:
            start = len(held[:end].rstrip())
            mark = next((mark for mark in self._format.around if held.endswith(mark, 0, start)), "")
            if not mark:
                return start
            end = start - len(mark)

    def _partial(self, held: str) -> int:
        """How many of the last characters may be the beginning of a mark."""
        start = max(0, len(held) - self._longest + 1)
        for place, character in enumerate(held[start:], start):
            if character in self._firsts and any(mark.startswith(held[place:]) for mark in self._marks):
                return len(held) - place
        return 0

    def _read_call(self, parts: list[Part], final: bool) -> bool:
        found = self._call(final)
        if found is None:
            if not final:
                return False
            found = _Found([], 0)
        if not found.calls or (self._format.bare and any(name not in self._tools for name, _ in found.calls)):
            self._num_broken += 1
            self._is_start = False
            # The mark is content; what follows it may still hold a call.
            self._say(parts, self._before or "", self._held)
            self._before, self._span = None, None
            return True
        parts.extend(Call(name, arguments) for name, arguments in found.calls)
        self._held = self._held[found.end :]
        self._before, self._span = None, None
        self._closes = [*self._format.closes, *self._format.around]
        return True

    def _call(self, final: bool) -> _Found | None:
        """The calls at the beginning of what is held, none of them if they cannot be any; None: wait for more."""
        start = len(self._held) - len(self._held.lstrip())
        text = self._held[start:]
        nothing = _Found([], 0)
        if not text:
            return None
        format = self._format
        if text[0] in "{[" or format.python:
            if self._span is not None:
                return self._spanned(text, start)
            beginning = text[:MAX_HEAD_CHARS]
            as_json = text[0] in "{[" and call_syntax.may_be_json_call(beginning)
            as_python = format.python and text[0] != "{" and call_syntax.may_be_python_call(beginning)
            if as_json and as_python:
                return None  # A list of either; its first character tells.
            if not as_json and not as_python:
                return nothing
            if len(text) < MAX_HEAD_CHARS:
                return self._spanned(text, start, Span(python=as_python))
            self._span = Span(python=as_python)
            return self._spanned(text, start)
        if format.tagged:
            return self._tagged(text, start)
        if format.head is None:
            return nothing
        brace = text.find("{", 0, MAX_HEAD_CHARS)
        if brace < 0:
            return nothing if len(text) >= MAX_HEAD_CHARS else None
        head = format.head.fullmatch(text, 0, brace)
        if head is None:
            return nothing
        self._span = self._span or Span(python=False)
        return self._spanned(text[brace:], start + brace, name=head[1])

    def _tagged(self, text: str, start: int) -> _Found | None:
        if not text.startswith(TAGGED_START):
            return None if TAGGED_START.startswith(text) else _Found([], 0)
        place = text.find(TAGGED_END)
        if place < 0:
            return None
        end = place + len(TAGGED_END)
        return _Found(call_syntax.tagged_call(text[:end], self._tools) or [], start + end)

    def _spanned(self, text: str, start: int, span: Span | None = None, *, name: str | None = None) -> _Found | None:
        span = span or self._span
        assert span is not None
        length = span.end(text)
        if length is None:
            return None
        value = text[:length]
        if name is not None:
            arguments = call_syntax.arguments_text(value)
            calls = None if arguments is None else [(name, arguments)]
        else:
            calls = call_syntax.python_calls(value) if span.python else call_syntax.json_calls(value)
        return _Found(calls or [], start + length)

    def _read_after(self, final: bool) -> bool:
        assert self._closes is not None
        rest = self._held.lstrip()
        for mark in self._closes:
            if rest.startswith(mark):
                self._closes.remove(mark)
                self._held = rest[len(mark) :]
                return True
        if not final and (not rest or any(mark.startswith(rest) for mark in self._closes)):
            return False
        if self._format.bare and rest[:1] in (*self._format.separators, "{"):
            call = rest.removeprefix(rest[:1]).lstrip() if rest[0] != "{" else rest
            if not call and not final:
                return False
            if call.startswith("{"):
                self._closes = None
                self._begin_call(rest[: len(rest) - len(call)], call)
                return True
        self._closes = None
        if not rest or not self._has_text:
            self._held = rest
        return bool(rest)
