"""How often each token occurs in a sequence, for penalties: counted as tokens come, not anew for every step.

Like a grammar's matcher (grammar.py) the counts follow the sequence's tokens and nothing else, so whatever happened
between two looks is of no account.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.ops import TokenLists

FIRST_PLACES = 64


class TokenCounts:
    """Of all tokens from the `start`-th on."""

    def __init__(self, start: int) -> None:
        self._num_read = start
        self._places: dict[int, int] = {}
        self._tokens: NDArray[np.int32] = np.empty(FIRST_PLACES, np.int32)
        self._counts: NDArray[np.float32] = np.empty(FIRST_PLACES, np.float32)

    def follow(self, tokens: NDArray[np.int32]) -> None:
        """`tokens` are all of the sequence: those of the last look, and more."""
        for token in tokens[self._num_read :].tolist():
            place = self._places.get(token)
            if place is None:
                place = self._places[token] = len(self._places)
                if place == len(self._tokens):
                    self._tokens, self._counts = np.resize(self._tokens, 2 * place), np.resize(self._counts, 2 * place)
                self._tokens[place], self._counts[place] = token, 0
            self._counts[place] += 1
        self._num_read = len(tokens)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Distinct ones, in the order in which they came."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._places)]


def counted(rows: Sequence[TokenCounts | None]) -> TokenLists | None:
    """Each row's distinct tokens with how often they occur; None when there are none at all."""
    counts = [row for row in rows if row is not None]
    tokens = [row.tokens for row in counts]
    if not any(map(len, tokens)):
        return None
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([0 if row is None else len(row.tokens) for row in rows], out=starts[1:])
    return TokenLists(starts, np.concatenate(tokens), np.concatenate([row.counts for row in counts]))
