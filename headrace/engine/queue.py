"""Who waits, how many may, and who of them may be started next.

A preempted sequence goes before every newcomer of its priority, and while it waits none of them is admitted. Under
"priority" nobody starves: of the sequences that wait, the one that came first may be overtaken MOST_OVERTAKEN times,
then it is the next to start. Background work has no such right.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from headrace.engine.admission import Refusal, SchedulerSettings
from headrace.engine.ranking import Ranking
from headrace.engine.request import Request, Sequence
from headrace.protocol.ipc import AddRequest

QUEUE_WINDOW = 16
"""Waiting sequences, from the head of the queue, that compete for the prefill share."""
MOST_OVERTAKEN = 16
"""Requests of better priority that may be started before one that came earlier."""


class Queue:
    """Sequences that wait. What is bounded are those of live requests that were never started, all `n` of a request."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._waiting = Ranking(lambda seq: (seq.rank[0], seq.num_preemptions == 0, *seq.rank[1:]))
        self.sequences = self._waiting.sequences
        """All that wait, in order; not to be changed."""
        self._longest: Sequence | None = None
        """Under "priority", of those that wait the one that came first; found anew for every step."""
        self.num_sequences = 0
        """Of live requests, and never started; those held back as forks among them."""
        self.num_tokens = 0
        """Prompt tokens of live requests of which no sequence was started."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    @property
    def is_live(self) -> bool:
        return self._waiting.is_live

    def add(self, seq: Sequence) -> None:
        self._waiting.add(seq)

    def remove(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
        if seq.queue_s is None:
            self.given_up(seq.request, 1)

    # bounds

    def refusal(self, message: AddRequest, could_start: int) -> Refusal | None:
        """Why there is no room for one more request, when so many sequences could start at once."""
        settings = self._settings
        n = message.params.n
        if self.num_sequences + n > settings.max_num_queued_reqs + could_start:
            asked = "" if n == 1 else f"this request asks for {n} answers, "
            return Refusal(
                "queue_full",
                f"{self.num_sequences} requests are waiting, {asked}and the queue holds "
                f"{settings.max_num_queued_reqs} (--max-num-queued-reqs). Try again later.",
            )
        limit = settings.max_num_queued_tokens
        num_tokens = len(message.token_ids) if message.queued_tokens is None else message.queued_tokens
        if limit is None or self.num_sequences < could_start or self.num_tokens + num_tokens <= limit:
            return None
        new = (seq.request.num_prompt_tokens for seq in self._waiting if not seq.request.started)
        waiting_tokens = self.num_tokens - sum(islice(new, could_start))
        if waiting_tokens + num_tokens <= limit:
            return None
        return Refusal(
            "queue_full",
            f"The prompts that wait have {waiting_tokens} tokens, this one has {num_tokens}, and the queue holds "
            f"{limit} (--max-num-queued-tokens). Try again later.",
        )

    def came(self, request: Request) -> None:
        """Background work fills no queue: who sends it bounds it."""
        if not request.is_background:
            self.num_sequences += request.params.n
            self.num_tokens += request.num_prompt_tokens

    def left(self, request: Request) -> None:
        """Its first sequence has been started, or it is over."""
        if not request.is_background:
            self.num_tokens -= request.num_prompt_tokens

    def given_up(self, request: Request, count: int) -> None:
        """So many of its sequences will never be started, or have been started just now."""
        if not request.is_background:
            self.num_sequences -= count

    # order

    def begin_step(self) -> None:
        by_priority = self._settings.policy == "priority"
        live = (seq for seq in self._waiting if not seq.request.is_background)
        self._longest = min(live, key=_arrival, default=None) if by_priority else None

    def admissible(self) -> list[Sequence]:
        """Those that may be started next: a preempted one alone, then one that was overtaken too often, else the first
        few of one priority."""
        window = self._waiting.first(QUEUE_WINDOW)
        if window and window[0].num_preemptions > 0:
            return window[:1]
        if self._longest is not None and self._longest.num_overtaken >= MOST_OVERTAKEN:
            return [self._longest]
        return [seq for seq in window if seq.rank[0] == window[0].rank[0]]

    def start(self, seq: Sequence) -> None:
        """It is started, and may have overtaken another."""
        self.remove(seq)
        if self._longest is None:
            return
        if seq is self._longest:
            self._longest = None
        elif _arrival(seq) > _arrival(self._longest) and seq.rank < self._longest.rank:
            self._longest.num_overtaken += 1


def _arrival(seq: Sequence) -> int:
    """The order of arrival of its request."""
    return seq.rank[2]
