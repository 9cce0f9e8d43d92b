"""Which requests a restarted core is given again, and in what order: so that one that kills it is found.

    death ─► those that have sent something fail, the rest wait
          ─► new core: the first alone, until it has got further than where the last core died; then the next ...
          ─► death again: the one that was being tried is to blame, and it alone fails

People's requests are tried first, and those that come meanwhile wait until the last of these is past, so that none is
mistaken for one of them. Behind them the lines of batches are tried, one at a time and beside people's requests, which
wait for none of them; a line that comes meanwhile waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.server.request_stream import RequestStream

DEATHS_TO_FAIL = 2
"""A request that so many cores died of fails."""


class Replays:
    """The requests that wait to be sent to the core: those to be done again, and those that came behind them."""

    def __init__(self) -> None:
        self._waiting: list[RequestStream] = []
        self._tried: RequestStream | None = None

    def __bool__(self) -> bool:
        """Requests wait, or the one that was sent last may still be the one that kills the core."""
        return bool(self._waiting) or self._tried is not None

    def hold(self, stream: RequestStream) -> None:
        """A new request that came while others are being done again; `due` says when to send it."""
        self._waiting.append(stream)

    def after_death(self, streams: Sequence[RequestStream]) -> list[RequestStream]:
        """Put the open requests, in order of arrival, in line after the core's death. Those to be failed as its cause.

        What cannot be done again the caller has failed before.
        """
        tried = self._tried if self._tried is not None and not self._tried.passed_its_death else None
        for stream in streams:
            if stream is tried or (tried is None and stream.in_core):
                stream.num_deaths += 1
            elif stream.in_core:
                # It came beside a batch's line that is to blame already; should that be wrong, it is tried next.
                stream.num_deaths = max(1, stream.num_deaths)
        suspects = streams if tried is None else [tried]
        guilty = [stream for stream in suspects if stream.in_core and stream.num_deaths >= DEATHS_TO_FAIL]
        self._waiting = [stream for stream in streams if stream not in guilty]
        for stream in self._waiting:
            if stream.in_core:
                stream.rewind()
        self._tried = None
        return guilty

    def due(self) -> list[RequestStream]:
        """Those to send now: one of those to be tried, those that need not wait for it, or all that wait."""
        if self._tried is not None and self._tried.passed_its_death:
            self._tried = None
        self._waiting = [stream for stream in self._waiting if not stream.is_over]
        due = self._due(is_background=False)
        if not self._is_trying(is_background=False):
            due += self._due(is_background=True)
        sent = set(map(id, due))
        self._waiting = [stream for stream in self._waiting if id(stream) not in sent]
        return due

    def _due(self, *, is_background: bool) -> list[RequestStream]:
        """Of people's requests or of batches' lines: the next one to be tried or, when there is none left, all."""
        if self._is_trying(is_background=is_background):
            return []
        waiting = [stream for stream in self._waiting if stream.message.is_background == is_background]
        suspect = next((stream for stream in waiting if stream.num_deaths), None)
        if suspect is None:
            return waiting
        self._tried = suspect
        return [suspect]

    def _is_trying(self, *, is_background: bool) -> bool:
        return self._tried is not None and self._tried.message.is_background == is_background
