"""How much of the time work that nobody waits for may take beside requests that somebody does.

While live requests are there, steps with background work in them take at most SHARE of the time. Such a step may hold
much of it at once, which is cheaper than a little in every step; the steps after it go without, until it is paid for.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.request import Request

SHARE = 0.2


class BackgroundShare:
    """A balance of seconds: every step beside live requests earns SHARE of its time, one with background work costs
    all of it."""

    def __init__(self) -> None:
        self._balance_s = 0.0

    @property
    def is_due(self) -> bool:
        """Background work may be in the next step, beside live requests."""
        return self._balance_s > 0

    def step(self, requests: Sequence[Request], seconds: float) -> None:
        """A step for these took so long. What is earned while there is no background work is not saved up."""
        num_background = sum(request.is_background for request in requests)
        if num_background == len(requests):
            self._balance_s = 0.0
        elif num_background:
            self._balance_s += (SHARE - 1) * seconds
        else:
            self._balance_s = min(self._balance_s, 0.0) + SHARE * seconds
