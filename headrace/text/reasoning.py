"""Thinking apart from the answer: marks as data, whether the prompt has opened them, and the split as text comes.

    prompt "...<think>\\n"    answer "hm</think>\\n\\nYes."    ->  reasoning "hm", content "Yes."

Where an answer begins is read from the rendered prompt, not guessed from the model's name: a template may open the
mark, close it at once (thinking switched off), or leave it to the model. A mark that never closes loses nothing: all
of it is reasoning. White space beside the marks belongs to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    opens: str
    closes: str


_ROWS = (
    ReasoningFormat("qwen3", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
)

FORMATS: Mapping[str, ReasoningFormat] = {row.name: row for row in _ROWS}


def detected(template: str) -> ReasoningFormat | None:
    """The marks that a chat template knows; None where it knows none."""
    return next((row for row in _ROWS if row.opens in template or row.closes in template), None)


def opened_in(format: ReasoningFormat, prompt: str, continued: str | None = None) -> bool:
    """Whether a rendered prompt ends inside the marks, so that the answer begins with thinking.

    `continued`: the text of the last message, where the answer goes on with it.
    """
    if continued is not None:
        return continued.rfind(format.opens) > continued.rfind(format.closes)
    return prompt.rstrip().endswith(format.opens)


Kind = Literal["reasoning", "content"]


class ReasoningSplit:
    """One answer's text as pieces of reasoning, then of content. `is_open`: it begins inside the marks."""

    def __init__(self, format: ReasoningFormat, *, is_open: bool) -> None:
        self._format = format
        self._state: Literal["start", "reasoning", "content"] = "reasoning" if is_open else "start"
        self._after_mark = True
        """White space that comes now belongs to a mark, or nothing was said yet."""
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        return self._state == "reasoning"

    def add(self, text: str) -> list[tuple[Kind, str]]:
        self._held += text
        return self._advance(final=False)

    def finish(self) -> list[tuple[Kind, str]]:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> list[tuple[Kind, str]]:
        pieces: list[tuple[Kind, str]] = []
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(self._format.opens):
                self._state, self._held = "reasoning", begun[len(self._format.opens) :]
            elif not self._format.opens.startswith(begun) or final:
                self._state, self._after_mark = "content", False
            else:
                return pieces
        if self._state == "reasoning":
            self._think(pieces, final)
        if self._state == "content":
            if self._after_mark:
                self._held = self._held.lstrip()
                self._after_mark = not self._held
            if self._held:
                pieces.append(("content", self._held))
            self._held = ""
        return pieces

    def _think(self, pieces: list[tuple[Kind, str]], final: bool) -> None:
        if self._after_mark:
            self._held = self._held.lstrip()
            self._after_mark = not self._held
        before, mark, rest = self._held.partition(self._format.closes)
        if mark:
            self._state, self._after_mark, self._held = "content", True, rest
            before = before.rstrip()
        elif not final:
            end = len(before) - _partial(before, self._format.closes)
            end = len(before[:end].rstrip())
            before, self._held = before[:end], before[end:]
        else:
            self._held = ""
        if before:
            pieces.append(("reasoning", before))


def _partial(text: str, mark: str) -> int:
    """How many of the last characters may be the beginning of `mark`."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)
