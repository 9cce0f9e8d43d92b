"""What the server asks of the core besides requests, and the answers, which come in no particular order."""

from __future__ import annotations

import asyncio
from itertools import count

from headrace.protocol import errors, ipc
from headrace.protocol.errors import ApiError


class CoreControls:
    """Controls sent and not answered yet."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: dict[int, asyncio.Future[int]] = {}

    def new(self, action: ipc.ControlAction, path: str | None = None) -> tuple[ipc.Control, asyncio.Future[int]]:
        """The message to send, and what will hold its answer or raise the error that came instead."""
        number = next(self._numbers)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        return ipc.Control(number=number, action=action, path=path), answer

    def answered(self, message: ipc.Controlled) -> None:
        answer = self._open.pop(message.number, None)
        if answer is None or answer.done():
            return
        if message.error is None:
            answer.set_result(message.count)
        else:
            answer.set_exception(errors.conflict(message.error))

    def fail_all(self, error: ApiError) -> None:
        waiting, self._open = self._open, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(error)
