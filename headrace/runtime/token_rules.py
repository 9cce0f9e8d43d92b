"""Which tokens a sequence may not, or may only, take next: made ready once, asked at every step.

A bad word is a sequence of tokens; its last one is forbidden where the generated tokens end in the others:

    bad word 7 8 9      generated ... 7 8      next may not be 9
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.ipc import SamplingParams

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
class TokenRules:
    """A sequence's own rules. `stops` are its stop tokens, forbidden before it has `min_tokens` tokens."""

    allowed: Tokens | None
    bad_words: BadWords | None
    stops: Tokens
    min_tokens: int

    @classmethod
    def of(cls, params: SamplingParams) -> TokenRules:
        allowed = params.allowed_token_ids
        return cls(
            allowed=None if allowed is None else np.unique(np.array(allowed, np.int32)),
            bad_words=BadWords.of(params.bad_words) if params.bad_words else None,
            stops=np.array(params.stop_token_ids if params.min_tokens else (), np.int64),
            min_tokens=params.min_tokens,
        )

    @property
    def forbids(self) -> bool:
        return self.bad_words is not None or len(self.stops) > 0

    def forbidden(self, generated: Tokens, vocab_size: int) -> Tokens:
        """What the next token may not be, in no order and perhaps more than once."""
        pieces: list[Tokens] = []
        if len(generated) < self.min_tokens:
            pieces.append(self.stops[(self.stops >= 0) & (self.stops < vocab_size)].astype(np.int32))
        if self.bad_words is not None:
            pieces += self.bad_words.forbidden(generated)
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
