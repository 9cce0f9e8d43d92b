"""Which tokens a sequence may not, or may only, take next: made ready once, asked at every step.

A bad word is a sequence of tokens; its last one is forbidden where the generated tokens end in the others:

    bad word 7 8 9      generated ... 7 8      next may not be 9
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.ipc import SamplingParams, ThinkingBudget

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BadWords:
    """`always` is forbidden everywhere; `starts` [k, length] and `lasts` [k] are k words of length + 1 tokens."""

    always: Tokens
    longer: tuple[tuple[Tokens, Tokens], ...]

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> BadWords:
        by_length: dict[int, list[Sequence[int]]] = {}
        for word in words:
            by_length.setdefault(len(word), []).append(word)
        longer = [np.array(group, np.int32) for length, group in sorted(by_length.items()) if length > 1]
        always = np.array([word[0] for word in by_length.get(1, ())], np.int32)
        return cls(always, tuple((group[:, :-1], group[:, -1]) for group in longer))

    def forbidden(self, generated: Tokens) -> list[Tokens]:
        """What would complete a word after the tokens `generated`, in pieces."""
        pieces = [self.always]
        for starts, lasts in self.longer:
            length = starts.shape[1]
            if len(generated) >= length:
                pieces.append(lasts[(starts == generated[-length:]).all(axis=1)])
        return pieces


@dataclass(frozen=True, slots=True)
class ThinkingEnd:
    """The end of thinking that comes when the budget is spent; see `ThinkingBudget`."""

    max_tokens: int
    begin: Tokens
    end: Tokens

    @classmethod
    def of(cls, budget: ThinkingBudget) -> ThinkingEnd:
        begin, end = (np.array(ids, np.int32) for ids in (budget.begin_token_ids, budget.end_token_ids))
        return cls(budget.max_tokens, begin, end)

    def next(self, generated: Tokens) -> int | None:
        """The token that must come now; None where any may. Looks at the tokens only while the end would come."""
        thought = generated[len(self.begin) :]
        place = len(thought) - self.max_tokens
        if not 0 <= place < len(self.end) or not np.array_equal(generated[: len(self.begin)], self.begin):
            return None
        within, since = thought[: self.max_tokens], thought[self.max_tokens :]
        if _holds(within, self.end) or not np.array_equal(since, self.end[:place]):
            return None
        return int(self.end[place])


def _holds(tokens: Tokens, sought: Tokens) -> bool:
    if len(tokens) < len(sought):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(sought))
    return bool((windows == sought).all(axis=1).any())


@dataclass(frozen=True, slots=True)
class TokenRules:
    """A sequence's own rules. `stops` are its stop tokens, forbidden before it has `min_tokens` tokens."""

    allowed: Tokens | None
    bad_words: BadWords | None
    stops: Tokens
    min_tokens: int
    thinking: ThinkingEnd | None = None

    @classmethod
    def of(cls, params: SamplingParams) -> TokenRules:
        allowed = params.allowed_token_ids
        return cls(
            allowed=None if allowed is None else np.unique(np.array(allowed, np.int32)),
            bad_words=BadWords.of(params.bad_words) if params.bad_words else None,
            stops=np.array(params.stop_token_ids if params.min_tokens else (), np.int64),
            min_tokens=params.min_tokens,
            thinking=ThinkingEnd.of(params.thinking) if params.thinking is not None else None,
        )

    @property
    def forbids(self) -> bool:
        return self.bad_words is not None or len(self.stops) > 0

    def only(self, generated: Tokens) -> Tokens | None:
        """The tokens of which the next one must be one; None where any may come."""
        forced = self.thinking.next(generated) if self.thinking is not None else None
        return self.allowed if forced is None else np.array([forced], np.int32)

    def forbidden(self, generated: Tokens, vocab_size: int) -> Tokens:
        """What the next token may not be, in no order and perhaps more than once."""
        if self.thinking is not None and self.thinking.next(generated) is not None:
            return generated[:0]
        pieces: list[Tokens] = []
        if len(generated) < self.min_tokens:
            pieces.append(self.stops[(self.stops >= 0) & (self.stops < vocab_size)].astype(np.int32))
        if self.bad_words is not None:
            pieces += self.bad_words.forbidden(generated)
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
