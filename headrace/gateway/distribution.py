"""Histograms as plain numbers: how many values fell under each bound, and their sum."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Distribution:
    """Values seen of one thing."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, values up to it), as the text format wants it."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


def merged(parts: Iterable[Distribution]) -> Distribution:
    """All values of at least one distribution, which all have the same bounds."""
    first, *rest = parts
    whole = Distribution(first.bounds)
    whole.counts = [sum(counts) for counts in zip(first.counts, *(part.counts for part in rest), strict=True)]
    whole.total = first.total + sum(part.total for part in rest)
    return whole
