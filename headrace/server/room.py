"""How much may be open at once: sequences that run together (--max-num-seqs) and that wait (--max-num-queued-reqs).

Every answer counts, each prompt's `n` of them. A request's places are taken together, before its first prompt is sent,
so it is refused as a whole or not at all; its prompts are then sent as the engine gets on with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.protocol import errors
from headrace.protocol.ipc import EngineInfo, is_background
from headrace.server.metrics import EngineMetrics


@dataclass(eq=False)
class Group:
    """The prompts of one client's request on their way."""

    num_to_come: int
    """Sequences that the engine has not been given yet."""
    num_tokens: int
    """Of all prompts."""
    most_open: int
    """Sequences of it to have with the engine at a time, and so the most that another request waits behind."""
    is_begun: bool = False
    """The first prompt was sent."""


class Room:
    """Places for the sequences of live requests; background work takes none, as whoever sends it bounds it."""

    def __init__(self, max_queued: int, num_sent: Callable[[], int], metrics: EngineMetrics) -> None:
        """`num_sent` tells how many sequences of live requests the engine was given and has not finished."""
        self._metrics = metrics
        self._max_queued = max_queued
        self._num_sent = num_sent
        self._groups: set[Group] = set()

    @property
    def num_to_come(self) -> int:
        """Sequences that were let in and not sent yet."""
        return sum(group.num_to_come for group in self._groups)

    def check(self, num_sequences: int, info: EngineInfo) -> None:
        """Raises ApiError (429) where so many more would be too many.

        The scheduler's queue has the same rule, but hears of a prompt only when it is sent.
        """
        num_open = self._num_sent() + self.num_to_come
        if num_open + num_sequences <= info.max_running + self._max_queued:
            return
        self._metrics.refused("queue_full")
        waiting = max(0, num_open - info.max_running)
        asked = "" if num_sequences == 1 else f"this request asks for {num_sequences} answers, "
        raise errors.queue_full(
            f"{waiting} requests are waiting, {asked}and the queue holds {self._max_queued} (--max-num-queued-reqs). "
            "Try again later."
        )

    @contextmanager
    def group(self, num_sequences: int, num_tokens: int, info: EngineInfo, *, priority: int) -> Iterator[Group]:
        """Places for all sequences of a request. Raises ApiError (429)."""
        # A few more than run at once, so that the next are there when one ends.
        group = Group(num_sequences, num_tokens, info.max_running + info.max_running // 4 + 1)
        if is_background(priority):
            yield group
            return
        self.check(num_sequences, info)
        self._groups.add(group)
        try:
            yield group
        finally:
            self._groups.discard(group)
