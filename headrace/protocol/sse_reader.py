"""Reading server-sent events from bytes as they come, in whatever pieces.

A line may end in LF, CRLF or CR; `data:` lines of one event are joined by newlines; comments and a byte order
mark are skipped. What is kept between two pieces is at most one unfinished event, and that is bounded.

    reader.feed(b"data: {\"a\"")  -> []
    reader.feed(b": 1}\r\n\r\n")   -> [ServerEvent(name=None, data='{"a": 1}')]
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""An event longer than this is no event: something other than a stream of them is being read."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event. `name` is the value of its `event:` line, None without one."""

    name: str | None
    data: str


class EventTooLong(Exception):
    """More than `limit_bytes` without an event's end."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"a server-sent event has more than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class SseReader:
    """The incremental parser. `feed` gives the events that became complete."""

    def __init__(self, limit_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._name: str | None = None
        self._size_bytes = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Raises EventTooLong; the reader is of no use after that."""
        if not piece:
            return []
        if self._after_cr and piece[:1] == b"\n":
            piece = piece[1:]
        self._after_cr = piece[-1:] == b"\r" if piece else False
        events: list[ServerEvent] = []
        lines = _lines(piece)
        for line in lines[:-1]:
            if self._line:
                self._line += line
                line = bytes(self._line)
                self._line.clear()
            event = self._end_line(line)
            if event is not None:
                events.append(event)
        self._line += lines[-1]
        if self._size_bytes + len(self._line) > self._limit_bytes:
            raise EventTooLong(self._limit_bytes)
        return events

    def finish(self) -> list[ServerEvent]:
        """The stream has ended: the last event, if its closing blank line is all that is missing.

        Servers that close the connection right after the last data line exist; a line cut in its middle is left out
        by whoever reads the data as JSON.
        """
        last = self._end_line(bytes(self._line)) if self._line else None
        self._line.clear()
        return [event for event in (last, self._dispatch()) if event is not None]

    @property
    def is_between_events(self) -> bool:
        """Nothing of an unfinished event is held."""
        return not self._line and not self._data and self._name is None

    def _end_line(self, line: bytes) -> ServerEvent | None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        if field == b"data":
            value = value.removeprefix(b" ")
            self._size_bytes += len(value) + 1
            if self._size_bytes > self._limit_bytes:
                raise EventTooLong(self._limit_bytes)
            self._data.append(value)
        elif field == b"event":
            self._name = value.removeprefix(b" ").decode("utf-8", "replace")
        return None

    def _dispatch(self) -> ServerEvent | None:
        data, name = self._data, self._name
        self._data, self._name, self._size_bytes = [], None, 0
        if not data:
            return None
        return ServerEvent(name or None, b"\n".join(data).decode("utf-8", "replace"))


def _lines(piece: bytes) -> list[bytes]:
    """Split at CRLF, CR and LF; the last part has no end yet."""
    if b"\r" in piece:
        piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return piece.split(b"\n")
