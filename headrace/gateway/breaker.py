"""Circuit breakers: an upstream that fails is left alone for a while, then tried with one request.

    closed --5 failures in a row, or half of the last 20 or more--> open --10 s--> half open --success--> closed
                                                                      ^---failure (twice as long, at most 60 s)--'

One breaker for each (upstream, replica, model). What the caller did wrong (4xx) is no failure. Pure: the clock is
an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

State = Literal["closed", "open", "half_open"]

CONSECUTIVE = 5
WINDOW_S = 30.0
WINDOW_MIN = 20
RATIO = 0.5
OPEN_S = 10.0
MAX_OPEN_S = 60.0
PROBE_S = 30.0
"""A probe that has told nothing for so long is given up; the next request probes."""
MAX_BREAKERS = 10_000

Key = tuple[str, int, str]
"""Upstream, replica, model at the upstream."""


@dataclass(slots=True)
class Breaker:
    failures_in_a_row: int = 0
    open_until_s: float | None = None
    """None = closed."""
    open_for_s: float = OPEN_S
    probe_since_s: float | None = None
    results: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=200))

    def state(self, now_s: float) -> State:
        if self.open_until_s is None:
            return "closed"
        return "open" if now_s < self.open_until_s else "half_open"

    def allows(self, now_s: float) -> bool:
        """Whether a request may go now. In the half-open state the first that asks is the probe."""
        if self.open_until_s is None:
            return True
        if now_s < self.open_until_s:
            return False
        if self.probe_since_s is not None and now_s - self.probe_since_s < PROBE_S:
            return False
        self.probe_since_s = now_s
        return True

    def succeeded(self, now_s: float) -> None:
        self.failures_in_a_row = 0
        if self.open_until_s is not None:
            if now_s >= self.open_until_s:  # not the late answer to a request from before
                self.open_until_s = self.probe_since_s = None
                self.open_for_s = OPEN_S
                self.results.clear()
        elif self.results:  # a breaker that has seen no failure keeps no record
            self.results.append((now_s, True))

    def failed(self, now_s: float) -> None:
        self.failures_in_a_row += 1
        self.results.append((now_s, False))
        if self.open_until_s is not None:
            if now_s >= self.open_until_s:
                self.open_for_s = min(2 * self.open_for_s, MAX_OPEN_S)
                self.open_until_s, self.probe_since_s = now_s + self.open_for_s, None
        elif self.failures_in_a_row >= CONSECUTIVE or self._mostly_failing(now_s):
            self.open_until_s = now_s + self.open_for_s

    def released(self) -> None:
        """The request ended without telling anything about the upstream (the caller's mistake, or it left)."""
        self.probe_since_s = None

    def _mostly_failing(self, now_s: float) -> bool:
        while self.results and self.results[0][0] < now_s - WINDOW_S:
            self.results.popleft()
        failures = sum(not succeeded for _, succeeded in self.results)
        return len(self.results) >= WINDOW_MIN and failures >= RATIO * len(self.results)


class Breakers:
    """All breakers, made when first needed."""

    def __init__(self) -> None:
        self._breakers: dict[Key, Breaker] = {}

    def of(self, key: Key) -> Breaker:
        breaker = self._breakers.get(key)
        if breaker is None:
            if len(self._breakers) >= MAX_BREAKERS:
                self._breakers.clear()
            breaker = self._breakers[key] = Breaker()
        return breaker

    def states(self, now_s: float) -> dict[Key, State]:
        return {key: breaker.state(now_s) for key, breaker in self._breakers.items()}
