"""What all requests of one gateway process share: the configuration in force and the machinery around it.

`snapshot` is the one pointer that a reload moves. Everything else is made once, at start-up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.gateway.balance import Balancer
from headrace.gateway.breaker import Breakers
from headrace.gateway.deadline import Deadlines
from headrace.gateway.key_index import KeyIndex
from headrace.gateway.limits import Limiter
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.prompt_log import PromptLog
from headrace.gateway.snapshot import Snapshot
from headrace.gateway.traces import Tracer
from headrace.gateway.upstream_client import UpstreamClients


class UsageSink(Protocol):
    """Takes the event of each finished request; never blocks."""

    def append(self, event: Any) -> None: ...


@dataclass(slots=True, kw_only=True)
class GatewayState:
    snapshot: Snapshot
    keys: KeyIndex
    limiter: Limiter
    usage: UsageSink
    metrics: GatewayMetrics
    prompts: PromptLog
    clients: UpstreamClients = field(default_factory=UpstreamClients)
    breakers: Breakers = field(default_factory=Breakers)
    balancer: Balancer = field(default_factory=Balancer)
    deadlines: Deadlines = field(default_factory=Deadlines)
    without_responses: set[str] = field(default_factory=set)
    """Upstreams that turned out to have no /responses; requests to them are translated."""
    without_count_tokens: set[str] = field(default_factory=set)
    """Upstreams that turned out to count no tokens; the gateway estimates for them."""
    tracer: Tracer | None = None
    """None = nothing is traced."""
    reload_error: str | None = None
    """Why the newest configuration is not in force; None = it is."""
    is_draining: bool = False
    num_open: int = 0
    """Requests being answered."""
    started_s: float = field(default_factory=time.time)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def take(self, snapshot: Snapshot) -> None:
        """Put a new configuration in force. Requests that have begun end under the old one."""
        self.snapshot = snapshot
        self.reload_error = None
        self.without_responses.clear()
        self.without_count_tokens.clear()
        self.clients.keep(snapshot.upstreams)
        self.metrics.config_generation = snapshot.generation

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the requests; it is ended with the gateway."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def close(self) -> None:
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.clients.close()
