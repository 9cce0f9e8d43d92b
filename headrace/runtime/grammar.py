"""A grammar at work: one matcher a sequence, which says which tokens may come next.

A matcher's state follows from the tokens its sequence has generated and from nothing else: before a mask is made it
takes in those it has not seen yet. So a sequence that comes back after a preemption, a fork, or one whose step was
done again has the masks it would have had, in whatever order steps are planned.

The matcher is the grammar library's (grammar_source.py); nothing of it is imported here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]
"""[ceil(vocabulary / 32)]: bit t % 32 of word t // 32 says whether token t may come."""
Tokens = NDArray[np.int32]

MAX_DIGITS = 20
"""Of an integer in JSON: none of 64 bits has more."""
MAX_DECIMAL_DIGITS = 13
"""Of a number with a point. With one more token of digits they are 15: so many a double keeps apart, and a number that
is less than a limit is not rounded to it."""
MAX_EXPONENT_DIGITS = 2
MASK_S, MASKS_AHEAD_S = 0.002, 0.1
"""Processor time that a sequence's masks may take: so much for each token, and so much before it counts. Usual ones
take 0.02 to 0.1 ms; the library's own limits do not bound every grammar."""
MAX_QUOTED_CHARS = 200
"""Of what the library says of its own trouble."""
_TAIL_BYTES = 64
_NUMBER = re.compile(rb"[\[{:,] ?(?:\r?\n[ \t]*)?-?(?P<body>[0-9][0-9.]*(?P<exponent>[eE][+-]?[0-9]*)?)\Z")


class GrammarError(Exception):
    """A grammar that cannot be used. The message is for the client, `field` the part of the request at fault."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class DeadEnd(Exception):
    """No token may come next, and the text is not complete; the message is for the client."""


class TooCostly(DeadEnd):
    """Text may follow, but finding out which costs too much; the message says why, for the client."""


@dataclass(frozen=True, eq=False)
class TokenKinds:
    """Of the model's tokens: their bytes, and which of them begin with a digit, or with a zero."""

    token_bytes: Sequence[bytes]
    digits: Mask
    zeros: Mask


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar. `matcher` stands at the beginning and is only copied. `after` as in GrammarSpec."""

    tokens: TokenKinds
    matcher: Any
    after: tuple[int, ...]
    holds_json: bool

    def start(self) -> GrammarState:
        """For a new sequence."""
        return GrammarState(self)


class GrammarState:
    """Where one sequence stands in its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._tokens = grammar.tokens
        self.matcher = grammar.matcher.deep_copy()
        self._holds_json = grammar.holds_json
        self._after = grammar.after
        self._begun = not grammar.after
        self._num_seen = 0
        self._spent_s = 0.0
        self._tail = b","

    def mask(self, generated: Tokens) -> Mask | None:
        """Which tokens may follow `generated`; None: all. Raises DeadEnd, also where the grammar costs too much."""
        started_s = time.thread_time()
        self._take_in(generated)
        if not self._begun:
            return None
        mask = np.zeros_like(self._tokens.digits)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._spent_s += time.thread_time() - started_s
        if self._spent_s > MASKS_AHEAD_S + MASK_S * len(generated):
            raise TooCostly("its masks take too much time")
        if self.matcher.is_stopped() and not self.matcher.is_accepting():
            if self.matcher.is_error() and "NoExtension" not in self.matcher.get_error():
                raise TooCostly(self._trouble())
            raise DeadEnd("no text that follows would fit it")
        if self._holds_json and self._number_is_long():
            # Where only digits may come, such as behind -44.000 for less than -44, a zero would only put it off.
            for unwanted in (self._tokens.digits, self._tokens.zeros):
                shorter = mask & ~unwanted
                if shorter.any():
                    return shorter
        return mask

    def _trouble(self) -> str:
        """Why the library gave up."""
        said = str(self.matcher.get_error()).partition("\n")[0][:MAX_QUOTED_CHARS]
        return _REASONS.get(self.matcher.stop_reason()) or f"the grammar library gave up ({said})"

    def is_complete(self, generated: Tokens) -> bool:
        """Whether nothing may follow `generated`: the last token was an end token, or the text is complete."""
        self._take_in(generated)
        return self._begun and (bool(self.matcher.is_stopped()) and not self.matcher.is_error())

    def _take_in(self, generated: Tokens) -> None:
        fresh = generated[self._num_seen :].tolist()
        if not self._begun:
            first = max(0, self._num_seen - len(self._after) + 1)
            place = _find(generated[first:].tolist(), self._after)
            if place is None:
                self._num_seen = len(generated)
                return
            self._begun = True
            self._num_seen = first + place + len(self._after)
            fresh = generated[self._num_seen :].tolist()
        if not fresh:
            return
        self._num_seen = len(generated)
        self.matcher.consume_tokens(fresh)
        if self._holds_json:
            text = b"".join(self._tokens.token_bytes[token_id] for token_id in fresh[-_TAIL_BYTES:])
            self._tail = (self._tail + text)[-_TAIL_BYTES:]

    def _number_is_long(self) -> bool:
        """Whether the text ends in a number of JSON that has digits enough. Within a string that looks like one this
        is no harm: the string can go on with anything else."""
        if not self._tail[-1:].isdigit():
            return False
        number = _NUMBER.search(self._tail)
        if number is None:
            return False
        if number["exponent"]:
            return len(number["exponent"].lstrip(b"eE+-")) >= MAX_EXPONENT_DIGITS
        whole, point, decimals = number["body"].partition(b".")
        return len(whole + decimals) >= MAX_DECIMAL_DIGITS if point else len(whole) >= MAX_DIGITS


def mask_of(token_ids: Sequence[int] | Tokens, num_words: int) -> Mask:
    """The mask that has these tokens."""
    bits = np.zeros(num_words * 32, np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _find(tokens: list[int], wanted: tuple[int, ...]) -> int | None:
    places = range(len(tokens) - len(wanted) + 1)
    return next((place for place in places if tuple(tokens[place : place + len(wanted)]) == wanted), None)


_REASONS = {
    "ParserTooComplex": "there are too many ways to read the text",
    "LexerTooComplex": "its expressions are too costly to follow",
}
