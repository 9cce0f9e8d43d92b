"""What the engines behind an upstream with replicas say of their load, for the balancer: a look a second at /metrics.

vLLM and Headrace name the same three gauges: requests running, requests waiting, the KV cache's use. It is read beside
the requests, each replica in a task of its own; one that has no such metrics is asked again a minute later.
"""

from __future__ import annotations

import asyncio
import math
import re

from headrace.gateway import headers
from headrace.gateway.balance import EngineLoad
from headrace.gateway.health import for_each_replica
from headrace.gateway.snapshot import Upstream
from headrace.gateway.state import GatewayState
from headrace.gateway.upstream_client import BrokenAnswer
from headrace.gateway.upstream_errors import UpstreamFailure

INTERVAL_S = 1.0
PATIENCE_S = 1.0
PAUSE_S = 60.0
"""Before a replica that told no load is asked again."""
MAX_BYTES = 4 << 20

_GAUGE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc)"
    rb"(?:\{[^\n]*\})? ([0-9.eE+-]+)",
    re.MULTILINE,
)


async def follow_loads(state: GatewayState, *, interval_s: float = INTERVAL_S) -> None:
    """Runs until cancelled."""

    async def follow(upstream: Upstream, replica: int) -> None:
        while True:
            load = await _asked(state, upstream, replica)
            state.balancer.told(upstream.name, replica, load)
            await asyncio.sleep(interval_s if load is not None else PAUSE_S)

    await for_each_replica(state, lambda upstream: len(upstream.base_urls) > 1, follow)


def engine_load(exposition: bytes) -> EngineLoad | None:
    """The load in a body of /metrics; of several models or engines behind one address the sum. None: it has none."""
    sums = {b"num_requests_running": 0.0, b"num_requests_waiting": 0.0}
    uses: list[float] = []
    found = _GAUGE.findall(exposition)
    for name, text in found:
        try:
            value = float(text)
        except ValueError:
            return None
        if not math.isfinite(value) or value < 0:
            return None
        if name in sums:
            sums[name] += value
        else:
            uses.append(value)
    if not found:
        return None
    return EngineLoad(
        running=int(sums[b"num_requests_running"]),
        waiting=int(sums[b"num_requests_waiting"]),
        kv_use=min(1.0, max(uses, default=0.0)),
    )


async def _asked(state: GatewayState, upstream: Upstream, replica: int) -> EngineLoad | None:
    sent = headers.forwarded((), b"engine-load", dialect=upstream.dialect)
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await state.clients.of(upstream).send("GET", upstream.root_url("/metrics", replica), sent, None)
            try:
                return engine_load(await answer.read_whole(MAX_BYTES)) if answer.status == 200 else None
            finally:
                answer.close()
    except (UpstreamFailure, BrokenAnswer, TimeoutError):
        return None
