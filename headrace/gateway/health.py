"""Health checks of upstreams with replicas: a task each, so that a hung one delays nobody.

A replica that fails two checks in a row is taken only when no healthy one is left; one good check brings it back.
An upstream with one address is not asked: its breaker says the same, and there is nobody to turn to instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.gateway import headers
from headrace.gateway.snapshot import Snapshot, Upstream
from headrace.gateway.state import GatewayState
from headrace.gateway.upstream_client import BrokenAnswer
from headrace.gateway.upstream_errors import UpstreamFailure

INTERVAL_S = 5.0
PATIENCE_S = 3.0
FAILURES = 2

logger = logging.getLogger("headrace.gateway")


async def check_health(state: GatewayState, *, interval_s: float = INTERVAL_S) -> None:
    """Runs until cancelled."""

    async def follow(upstream: Upstream, replica: int) -> None:
        failures = 0
        while True:
            works = await _works(state, upstream, replica)
            failures = 0 if works else failures + 1
            load = state.balancer.load(upstream.name, replica)
            healthy = failures < FAILURES
            if healthy != load.healthy:
                _say(logger.info if healthy else logger.warning, upstream, replica, healthy)
                load.healthy = healthy
            await asyncio.sleep(interval_s)

    await for_each_replica(
        state, lambda upstream: len(upstream.base_urls) > 1 or upstream.health_path is not None, follow
    )


async def for_each_replica(
    state: GatewayState,
    is_wanted: Callable[[Upstream], bool],
    follow: Callable[[Upstream, int], Coroutine[Any, Any, None]],
) -> None:
    """Keeps one task for each replica of the wanted upstreams of the configuration in force; until cancelled."""
    tasks: list[asyncio.Task[None]] = []
    snapshot: Snapshot | None = None
    try:
        while True:
            if state.snapshot is not snapshot:
                snapshot = state.snapshot
                for task in tasks:
                    task.cancel()
                tasks = [
                    asyncio.create_task(follow(upstream, replica))
                    for upstream in snapshot.upstreams.values()
                    if is_wanted(upstream)
                    for replica in range(len(upstream.base_urls))
                ]
            await asyncio.sleep(1.0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _say(log: Callable[..., None], upstream: Upstream, replica: int, healthy: bool) -> None:
    log("Replica %d of the upstream %s is %s.", replica, upstream.name, "healthy again" if healthy else "not healthy")


async def _works(state: GatewayState, upstream: Upstream, replica: int) -> bool:
    if upstream.health_path is not None:
        url = upstream.root_url(upstream.health_path, replica)
    else:
        url = upstream.url("/models", replica)
    sent = headers.forwarded((), b"health-check", dialect=upstream.dialect)
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await state.clients.of(upstream).send("GET", url, sent, None)
            try:
                await answer.read_error()
            finally:
                answer.close()
    except (UpstreamFailure, BrokenAnswer, TimeoutError):
        return False
    return answer.status < 500
