"""The lines of one batch answered: so many at a time, each written as it ends, every one once.

    input ─► window (requests, bytes) ─► a task a line: call, again while the engine is busy ─► output, errors

Where it is stopped, by whatever means, the output holds whole lines; a later run answers the others.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from headrace.protocol.batches import AnswerTo, LineFault, LineRequest, Reply, answer_line, fault_line
from headrace.server.batch_lines import Asked, CheckUrl, lines_to_do

Call = Callable[[LineRequest], Awaitable[Reply]]

BUSY = (429, 503)
"""What the engine answers while it has no room, restarts or sleeps; a line waits for it to be over."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0

MAX_WINDOW_BYTES = 128 << 20
"""Of bodies in flight; a longer one is in flight alone."""


class Window:
    """How much may be in flight, for all who share it: first come, first served, so that all batches get on."""

    def __init__(self, num_requests: int, num_bytes: int = MAX_WINDOW_BYTES) -> None:
        self._max_requests = num_requests
        self._max_bytes = num_bytes
        self._num_requests = 0
        self._num_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, num_bytes: int) -> None:
        if not self._waiting and self._has_room(num_bytes):
            self._take(num_bytes)
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.leave(num_bytes)
            self._admit()
            raise

    def leave(self, num_bytes: int) -> None:
        self._num_requests -= 1
        self._num_bytes -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, admitted = self._waiting[0]
            if admitted.done():  # its batch was cancelled
                self._waiting.popleft()
            elif self._has_room(num_bytes):
                self._waiting.popleft()
                self._take(num_bytes)
                admitted.set_result(None)
            else:
                return

    def _has_room(self, num_bytes: int) -> bool:
        if self._num_requests == 0:
            return True
        return self._num_requests < self._max_requests and self._num_bytes + num_bytes <= self._max_bytes

    def _take(self, num_bytes: int) -> None:
        self._num_requests += 1
        self._num_bytes += num_bytes


class OutputFile:
    """Whole lines added to a file. Raises OSError where one cannot be written, with nothing of it left behind."""

    def __init__(self, path: Path, end: int, take: Callable[[int], None] = lambda num_bytes: None) -> None:
        """`end`: the bytes that stay of what is there. `take` is asked for room before a line is added."""
        self._take = take
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.num_bytes = end
        os.ftruncate(self._file, end)

    def add(self, line: bytes) -> None:
        self._take(len(line))
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, self.num_bytes)
            raise
        self.num_bytes += len(line)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class BatchRun:
    """One batch on its way. `num_answered` and `num_failed` hold what earlier runs did too."""

    def __init__(
        self,
        source: Path,
        asked: Asked,
        *,
        answers: OutputFile,
        failures: OutputFile,
        num_failed: int,
        call: Call,
        check_url: CheckUrl,
        window: Window,
        limit_bytes: int,
        model: str = "",
    ) -> None:
        """`failures`, which may be `answers` itself, takes the lines of what did not succeed. `model`: its digest, for
        the answers' ids."""
        self.num_requests = asked.num_requests
        self.num_answered = asked.num_answered
        self.num_failed = num_failed
        self._source = source
        self._asked = asked
        self._answers = answers
        self._failures = failures
        self._call = call
        self._check_url = check_url
        self._window = window
        self._limit_bytes = limit_bytes
        self._model = model

    async def run(self) -> None:
        """Until every line is answered. Cancelled, it stops at once. Raises OSError where nothing can be written."""
        try:
            async with asyncio.TaskGroup() as tasks:
                async for line in lines_to_do(self._source, self._asked, self._limit_bytes):
                    try:
                        if isinstance(line, LineFault):
                            raise line
                        self._check_url(line)
                    except LineFault as fault:
                        self._write(fault_line(fault, AnswerTo(line.digest, self._model)), is_success=False)
                        continue
                    await self._window.enter(len(line.body))
                    tasks.create_task(self._answer(line)).add_done_callback(partial(self._leave, len(line.body)))
                    await asyncio.sleep(0)  # others' requests come between, not after all that fit the window
        except ExceptionGroup as group:
            failures, others = group.split(OSError)
            if failures is None or others is not None:
                raise
            raise failures.exceptions[0] from None

    def _leave(self, num_bytes: int, _: asyncio.Task[None]) -> None:
        self._window.leave(num_bytes)

    async def _answer(self, line: LineRequest) -> None:
        wait_s = FIRST_WAIT_S
        while (reply := await self._call(line)).status in BUSY:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        to = AnswerTo(line.digest, self._model)
        self._write(answer_line(line.custom_id, reply, to), is_success=reply.is_success)

    def _write(self, line: bytes, *, is_success: bool) -> None:
        (self._answers if is_success else self._failures).add(line)
        self.num_answered += 1
        self.num_failed += not is_success
