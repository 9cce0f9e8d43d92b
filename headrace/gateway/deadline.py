"""How long an upstream may take: the first token, the silence between two pieces, the whole answer.

with deadlines.limit(upstream, exchange, stream=True) as deadline:
    ...first content...     # at most first_token_s after the start
    deadline.began()
    deadline.touch()        # for each piece: one attribute is set, no timer is moved
# an expired limit comes out as UpstreamFailure (504) that names it

One timer stands for all of them: it is set for the earliest, and moved only where an earlier one comes.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from headrace.gateway import upstream_errors
from headrace.gateway.exchange import Exchange
from headrace.gateway.snapshot import Upstream


class Deadlines:
    """The limits of all attempts under way. One loop uses it."""

    def __init__(self) -> None:
        self._running: set[Deadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = float("inf")
        """When the timer fires."""

    def limit(self, upstream: Upstream, exchange: Exchange, *, stream: bool) -> Deadline:
        return Deadline(self, upstream, exchange, stream)

    def add(self, deadline: Deadline) -> None:
        self._running.add(deadline)
        self.watch(deadline)

    def remove(self, deadline: Deadline) -> None:
        self._running.discard(deadline)

    def watch(self, deadline: Deadline) -> None:
        """It may pass sooner than was known."""
        due_s = deadline.due_s()
        if due_s < self._at_s:
            if self._timer is not None:
                self._timer.cancel()
            self._at_s = due_s
            self._timer = asyncio.get_running_loop().call_at(due_s, self._look)

    def _look(self) -> None:
        self._timer, self._at_s = None, float("inf")
        for deadline in list(self._running):
            if deadline.look():
                self._running.discard(deadline)
            else:
                self.watch(deadline)


class Deadline:
    """Cancels the task of the exchange when a limit passes."""

    __slots__ = (
        "_active_s",
        "_deadlines",
        "_exchange",
        "_expired",
        "_is_stream",
        "_limit",
        "_loop",
        "_start_s",
        "_upstream",
    )

    def __init__(self, deadlines: Deadlines, upstream: Upstream, exchange: Exchange, stream: bool) -> None:
        self._deadlines = deadlines
        self._upstream = upstream
        self._exchange = exchange
        self._loop = exchange.loop
        self._is_stream = stream
        self._limit = "first_token" if stream else "total"
        self._expired: str | None = None

    def __enter__(self) -> Deadline:
        self._start_s = self._active_s = self._loop.time()
        self._deadlines.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.remove(self)
        if self._expired is None or self._exchange.client_left or not isinstance(error, asyncio.CancelledError):
            return
        if self._exchange.task is not None:
            self._exchange.task.uncancel()
        seconds = getattr(self._upstream.timeouts, f"{self._expired}_s")
        raise upstream_errors.timed_out(self._upstream, self._expired, seconds, is_whole=not self._is_stream) from None

    @property
    def is_over(self) -> bool:
        """The time for the whole answer has passed."""
        return self._expired == "total"

    def began(self) -> None:
        """The first content is there; from now on the silence between two pieces counts."""
        self._limit = "idle"
        self._active_s = self._loop.time()
        self._deadlines.watch(self)

    def touch(self) -> None:
        self._active_s = self._loop.time()

    def due_s(self) -> float:
        limits = self._upstream.timeouts
        total_s = self._start_s + limits.total_s
        if self._limit == "first_token":
            return min(total_s, self._start_s + limits.first_token_s)
        return min(total_s, self._active_s + limits.idle_s) if self._limit == "idle" else total_s

    def look(self) -> bool:
        """Whether it is done with: the limit has passed, or the last bytes are on their way to the client."""
        if self._exchange.is_finished:
            return True
        now_s = self._loop.time()
        if self._limit == "idle" and self._exchange.is_writing:
            self._active_s = now_s  # the client reads slowly: not the upstream's silence
        if now_s < self.due_s():
            return False
        is_total = now_s >= self._start_s + self._upstream.timeouts.total_s
        self._expired = "total" if is_total else self._limit
        if self._exchange.task is not None:
            self._exchange.task.cancel()
        return True
