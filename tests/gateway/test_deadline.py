"""Deadlines of many attempts at once: each passes at its own time, though one timer stands for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from headrace.gateway.deadline import Deadline, Deadlines
from headrace.gateway.exchange import Exchange
from headrace.gateway.snapshot import Timeouts, Upstream
from headrace.gateway.upstream_errors import UpstreamFailure
from headrace.protocol.http_connection import ANSWER, CLIENT_LEFT, WRITE

Work = Callable[[Deadline], object]


async def attempt(
    deadlines: Deadlines, timeouts: Timeouts, steps: list[tuple[float, Work]], *, stream: bool = True
) -> tuple[str, float]:
    """What it came to and after how many seconds: `steps` are pauses, and what is done after each."""
    extensions = {CLIENT_LEFT: lambda cut: None, ANSWER: None, WRITE: None}
    scope = {"method": "POST", "path": "/", "headers": [], "extensions": extensions}
    exchange = Exchange(scope, None, None)  # type: ignore[arg-type]
    exchange.watch()
    upstream = Upstream(name="u", base_url="http://h", timeouts=timeouts)
    began_s = time.monotonic()
    try:
        with deadlines.limit(upstream, exchange, stream=stream) as deadline:
            for pause_s, work in steps:
                await asyncio.sleep(pause_s)
                work(deadline)
    except UpstreamFailure as failure:
        return str(failure.error.code), time.monotonic() - began_s
    return "in time", time.monotonic() - began_s


def nothing(deadline: Deadline) -> None: ...


def test_each_attempt_has_its_own_limits() -> None:
    limits = Timeouts(first_token_s=0.3, idle_s=0.2, total_s=0.8)
    long = Timeouts(first_token_s=60, idle_s=60, total_s=600)
    touches = [(0.1, Deadline.began), *[(0.1, Deadline.touch)] * 20]

    async def all_at_once() -> list[tuple[str, float]]:
        deadlines = Deadlines()
        return await asyncio.gather(
            attempt(deadlines, long, [(1.0, nothing)], stream=False),
            attempt(deadlines, limits, [(5.0, nothing)], stream=False),
            attempt(deadlines, limits, [(5.0, nothing)]),
            attempt(deadlines, limits, [(0.1, Deadline.began), (5.0, nothing)]),
            attempt(deadlines, limits, touches),
            attempt(deadlines, limits, [(0.1, Deadline.began), (0.1, nothing)]),
            attempt(deadlines, long, [(0.1, Deadline.began), (0.1, Deadline.touch)]),
        )

    found = asyncio.run(all_at_once())
    codes = ["in time", "total", "first_token", "idle", "total", "in time", "in time"]
    assert [code.removeprefix("upstream_timeout_") for code, _ in found] == codes
    for (_, seconds), due_s in zip(found, (1.0, 0.8, 0.3, 0.3, 0.8, 0.2, 0.2), strict=True):
        assert seconds == pytest.approx(due_s, abs=0.15)


def test_a_passed_limit_ends_that_task_only_and_once() -> None:
    soon = Timeouts(total_s=0.05)

    async def again_and_again() -> list[str]:
        deadlines = Deadlines()
        codes = []
        for _ in range(3):
            code, _ = await attempt(deadlines, soon, [(5.0, nothing)], stream=False)
            codes.append(code)
            task = asyncio.current_task()
            assert task is not None and task.cancelling() == 0
            await asyncio.sleep(0.1)
        return codes

    assert asyncio.run(again_and_again()) == ["upstream_timeout_total"] * 3
