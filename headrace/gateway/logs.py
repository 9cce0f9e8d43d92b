"""The gateway's log: one JSON object a line on standard error, written by a thread of its own.

    {"time":"2026-11-29T18:40:01.123Z","level":"info","event":"request","request_id":"4f..","key":"sk-hr-Zk3v",
     "model":"qwen2-7b-local","upstream":"local","status":200,"outcome":"ok","total_ms":812.4, ...}

The request's path only puts a record into a queue; a thread takes what has gathered, formats it, takes secrets out of
the finished lines (tracebacks included) and writes them. Prompts and answers are never given to the log. When lines
come faster than they can be written they are dropped and counted: a log must not hold up a request.
"""

from __future__ import annotations

import functools
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from headrace.gateway.redact import Redactor

logger = logging.getLogger("headrace.gateway")

GATHER_S = 0.1
"""How long lines wait for company; warnings and errors do not wait."""
MAX_WAITING_LINES = 50_000

_RECORD = dict(logging.LogRecord(logger.name, logging.INFO, __file__, 0, "request", None, None).__dict__)

_encode = msgspec.json.Encoder(enc_hook=str).encode


class RequestLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One finished request. What has no value (None) is left out of its line."""

    request_id: str
    key: str | None = None
    """What may be shown of it."""
    method: str
    path: str
    status: int
    client: str | None = None
    traceparent: str | None = None
    trace_id: str | None = None
    model: str | None = None
    upstream: str | None = None
    upstream_model: str | None = None
    outcome: str | None = None
    code: str | None = None
    causes: list[str] | None = None
    stream: bool | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    attempts: int | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None


def log_request(line: RequestLine) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.callHandlers(_RequestRecord(line))


class _RequestRecord(logging.LogRecord):
    """A record without what it would cost to find out where it was made: there is one place only."""

    line: RequestLine

    def __init__(self, line: RequestLine) -> None:
        self.__dict__.update(_RECORD, line=line, created=time.time())


class GatewayLog:
    """The root logger's only handler between `start` and `close`."""

    def __init__(self, stream: TextIO | None = None, *, redactor: Redactor | None = None) -> None:
        self.redactor = redactor or Redactor()
        """Replaced when the configuration, and with it the known secrets, changes."""
        self.num_dropped = 0
        self._stream = stream
        self._waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._write_lines, name="log writer", daemon=True)
        self._handler = _Enqueue(self.accept)

    def start(self, level: str = "info") -> None:
        root = logging.getLogger()
        root.handlers[:] = [self._handler]
        root.setLevel(logging.WARNING)
        logging.getLogger("headrace").setLevel(level.upper())
        self._thread.start()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        if not self._thread.is_alive():
            return
        self._is_closing = True
        self._wake.set()
        self._thread.join(5)
        logging.getLogger().removeHandler(self._handler)

    def accept(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() >= MAX_WAITING_LINES:
            self.num_dropped += 1
            return
        self._waiting.put(record)
        if record.levelno >= logging.WARNING:
            self._wake.set()

    def _write_lines(self) -> None:
        while not self._is_closing:
            self._wake.wait(GATHER_S)
            self._wake.clear()
            self._write_waiting()
        self._write_waiting()

    def _write_waiting(self) -> None:
        lines = []
        for _ in range(self._waiting.qsize()):
            record = self._waiting.get()
            try:
                lines.append(_line(record))
            except Exception as error:  # a record that cannot be shown must not end the log
                lines.append(f'{{"level":"error","message":"log record of {record.name} unreadable: {type(error)}"}}')
        if not lines:
            return
        stream = self._stream or sys.stderr
        try:
            stream.write(self.redactor.clean("\n".join(lines)) + "\n")
            stream.flush()
        except (OSError, ValueError):
            self.num_dropped += len(lines)


def _line(record: logging.LogRecord) -> str:
    """Without its end, and with whatever secrets are in it."""
    moment = f"{_second(int(record.created))}.{int(record.created * 1000) % 1000:03d}Z"
    if isinstance(record, _RequestRecord):
        return f'{{"time":"{moment}","level":"info","event":"request",' + _encode(record.line).decode()[1:]
    values = {"time": moment, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
    if record.exc_text:
        values["traceback"] = record.exc_text
    return _encode(values).decode()


@functools.lru_cache(maxsize=4)
def _second(time_s: int) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class _Enqueue(logging.Handler):
    """Hands records over as they are; a traceback becomes text at once, so that no frame is kept alive."""

    def __init__(self, accept: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._accept = accept

    def createLock(self) -> None:
        """The queue is safe by itself; without a lock no request waits for another thread's record."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip()
            record.exc_info = None
        self._accept(record)
        return True
