"""Which requests a restarted core is given again, and in what order: so that one that kills it is found.

    death ─► those that have sent something fail, the rest wait
          ─► new core: the first alone, until it has got further than where the last core died; then the next ...
          ─► death again: the one that was being tried is to blame, and it alone fails

A request that comes meanwhile waits until the last of these is past, so that it is not mistaken for one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headrace.server.request_stream import RequestStream

DEATHS_TO_FAIL = 2
"""A request that so many cores died of fails."""


class Replays:
    """The requests that wait to be sent to the core: those to be done again, and those that came behind them."""

    def __init__(self) -> None:
        self._waiting: deque[RequestStream] = deque()
        self._tried: RequestStream | None = None

    def __bool__(self) -> bool:
        """Requests wait, or the one that was sent last may still be the one that kills the core."""
        return bool(self._waiting) or self._tried is not None

    def hold(self, stream: RequestStream) -> None:
        """A new request that came while others are being done again."""
        self._waiting.append(stream)

    def after_death(self, streams: Sequence[RequestStream]) -> list[RequestStream]:
        """Put the open requests, in order of arrival, in line after the core's death. Those to be failed as its cause.

        What cannot be done again the caller has failed before.
        """
        tried = self._tried if self._tried is not None and not self._tried.passed_its_death else None
        suspects = [tried] if tried is not None else [stream for stream in streams if stream.in_core]
        for stream in suspects:
            stream.num_deaths += 1
        guilty = [stream for stream in suspects if stream.num_deaths >= DEATHS_TO_FAIL]
        rest = [stream for stream in streams if stream not in guilty]
        for stream in rest:
            if stream.in_core:
                stream.rewind()
        self._waiting = deque(sorted(rest, key=lambda stream: stream.num_deaths == 0))
        self._tried = None
        return guilty

    def due(self) -> list[RequestStream]:
        """Those to send now: the next one to be tried alone, or, when there is none left, all that wait."""
        if self._tried is not None and not self._tried.passed_its_death:
            return []
        self._tried = None
        while self._waiting and self._waiting[0].is_over:
            self._waiting.popleft()
        if self._waiting and self._waiting[0].num_deaths:
            self._tried = self._waiting.popleft()
            return [self._tried]
        due = [stream for stream in self._waiting if not stream.is_over]
        self._waiting.clear()
        return due

    def clear(self) -> list[RequestStream]:
        """Give up on all that wait."""
        waiting, self._waiting, self._tried = list(self._waiting), deque(), None
        return waiting
