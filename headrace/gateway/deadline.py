"""How long an upstream may take: the first token, the silence between two pieces, the whole answer.

with Deadline(upstream, exchange, stream=True) as deadline:
    ...first content...     # at most first_token_s after the start
    deadline.began()
    deadline.touch()        # for each piece: one attribute is set, no timer is moved
# an expired limit comes out as UpstreamFailure (504) that names it
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from headrace.gateway import upstream_errors
from headrace.gateway.exchange import Exchange
from headrace.gateway.snapshot import Upstream


class Deadline:
    """Cancels the task that made it when a limit passes; one timer, looked at again when it fires."""

    __slots__ = (
        "_active_s",
        "_exchange",
        "_expired",
        "_handle",
        "_is_stream",
        "_limit",
        "_loop",
        "_start_s",
        "_task",
        "_upstream",
    )

    def __init__(self, upstream: Upstream, exchange: Exchange, *, stream: bool) -> None:
        self._upstream = upstream
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._is_stream = stream
        self._limit = "first_token" if stream else "total"
        self._expired: str | None = None

    def __enter__(self) -> Deadline:
        self._start_s = self._active_s = self._loop.time()
        self._handle = self._loop.call_at(self._due_s(), self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if self._expired is None or self._exchange.client_left or not isinstance(error, asyncio.CancelledError):
            return
        if self._task is not None:
            self._task.uncancel()
        seconds = getattr(self._upstream.timeouts, f"{self._expired}_s")
        raise upstream_errors.timed_out(self._upstream, self._expired, seconds, is_whole=not self._is_stream) from None

    @property
    def elapsed_s(self) -> float:
        return self._loop.time() - self._start_s

    @property
    def is_over(self) -> bool:
        """The time for the whole answer has passed."""
        return self._expired == "total"

    def began(self) -> None:
        """The first content is there; from now on the silence between two pieces counts."""
        self._limit = "idle"
        self._active_s = self._loop.time()
        self._handle.cancel()
        self._handle = self._loop.call_at(self._due_s(), self._look)

    def touch(self) -> None:
        self._active_s = self._loop.time()

    def _due_s(self) -> float:
        limits = self._upstream.timeouts
        total_s = self._start_s + limits.total_s
        if self._limit == "first_token":
            return min(total_s, self._start_s + limits.first_token_s)
        return min(total_s, self._active_s + limits.idle_s) if self._limit == "idle" else total_s

    def _look(self) -> None:
        if self._exchange.is_finished:
            return  # the last bytes are on their way to the client
        now_s = self._loop.time()
        if self._limit == "idle" and self._exchange.is_writing:
            self._active_s = now_s  # the client reads slowly: not the upstream's silence
        due_s = self._due_s()
        if now_s < due_s:
            self._handle = self._loop.call_at(due_s, self._look)
        elif self._task is not None:
            is_total = now_s >= self._start_s + self._upstream.timeouts.total_s
            self._expired = "total" if is_total else self._limit
            self._task.cancel()
