"""Sequences kept in order of rank, so that the first is the next to serve and the last the first to preempt."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any

from headrace.engine.request import Sequence


class Ranking:
    """A sorted list of sequences. A `key` belongs to one sequence and must not change while that is in the list."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        self._key = key
        self.sequences: list[Sequence] = []
        """In order; not to be changed by anybody else."""

    def add(self, seq: Sequence) -> None:
        insort(self.sequences, seq, key=self._key)

    def remove(self, seq: Sequence) -> None:
        at = bisect_left(self.sequences, self._key(seq), key=self._key)
        if at == len(self.sequences) or self.sequences[at] is not seq:
            raise KeyError(f"sequence {seq.seq_id} is not in this ranking")
        del self.sequences[at]

    def first(self, count: int) -> list[Sequence]:
        return self.sequences[:count]

    @property
    def num_live(self) -> int:
        """Those that somebody waits for."""
        last = self.sequences[-1] if self.sequences else None
        if last is None or not last.request.is_background:
            return len(self.sequences)
        return sum(not seq.request.is_background for seq in self.sequences)

    @property
    def is_live(self) -> bool:
        """Somebody waits for one of them: background work is ranked behind all that is not."""
        return bool(self.sequences) and not self.sequences[0].request.is_background

    def last(self) -> Sequence:
        return self.sequences[-1]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def __len__(self) -> int:
        return len(self.sequences)
