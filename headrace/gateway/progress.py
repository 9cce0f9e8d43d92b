"""What is known of a request while it is answered; at its end it becomes the usage event, the metrics, the log line.

Tokens are the upstream's count where there is one. Otherwise they are counted from the pieces that came, and marked.
"""

from __future__ import annotations

import time

import msgspec

from headrace.gateway.exchange import Exchange
from headrace.gateway.keys import KeyRecord
from headrace.gateway.request import Request
from headrace.gateway.route import Attempt, Route
from headrace.gateway.stream import Usage, Watch
from headrace.gateway.usage_event import Outcome, UsageEvent, cost_micros

CLIENT_CLOSED_REQUEST = 499
"""In usage, metrics and log only: the client left before there was anything to send."""


NOTHING = Usage(0, 0)


class Progress(msgspec.Struct):
    """Of one request. `attempt` is the one under way, or the last."""

    route: Route
    attempt: Attempt | None = None
    announced: Attempt | None = None
    """That which was under way when a stream had to begin without a word of the answer."""
    num_attempts: int = 0
    watch: Watch | None = None
    """The stream that is being passed on."""
    usage: Usage | None = None
    """Of a whole answer."""
    is_estimate: bool = False
    """`usage` is our count: the upstream gave none."""
    reached: bool = False
    """An upstream has begun to work on the prompt for the attempt under way."""
    ttft_s: float | None = None
    carried: Usage = NOTHING
    """Of an answer that broke and was gone on with elsewhere, with what it cost."""
    carried_micros: int = 0
    outcome: Outcome = "error"
    causes: list[str] = []
    """upstream:code of each failed attempt."""

    def tokens(self, request: Request) -> tuple[Usage, bool]:
        """What is billed, and whether it is an estimate. Nothing for a request that came to nothing."""
        if self.usage is not None:
            return self.usage, self.is_estimate
        watch = self.watch
        if watch is not None:
            if watch.usage is not None and watch.usage_is_final:
                return watch.usage, False
            inputs = watch.usage.input_tokens if watch.usage else request.facts.prompt_tokens
            cached = watch.usage.cached_tokens if watch.usage else 0
            return Usage(inputs, watch.num_deltas, cached), True
        if self.outcome == "ok" or (self.outcome == "client_left" and self.reached):
            return Usage(request.facts.prompt_tokens, 0), True
        return NOTHING, False

    def carry(self, request: Request) -> None:
        """What the attempt under way used stays billed; what comes now is another's."""
        assert self.attempt is not None
        used, _ = self.tokens(request)
        self.carried, self.carried_micros = used, self._cost(self.attempt, used)
        self.watch, self.reached = None, False

    @staticmethod
    def _cost(attempt: Attempt, usage: Usage) -> int:
        return cost_micros(attempt.price, usage.input_tokens, usage.output_tokens, usage.cached_tokens)

    def event(self, exchange: Exchange, request: Request, record: KeyRecord) -> UsageEvent:
        usage, estimated = self.tokens(request)
        attempt, carried = self.attempt, self.carried
        cost = self.carried_micros
        if attempt is not None:
            cost += self._cost(attempt, usage)
        return UsageEvent(
            time_s=time.time(),
            key_id=record.id,
            key_name=record.name,
            model=self.route.model.name,
            upstream=attempt.upstream.name if attempt else "",
            upstream_model=attempt.model if attempt else "",
            endpoint=request.endpoint.name,
            status=exchange.status or CLIENT_CLOSED_REQUEST,
            input_tokens=usage.input_tokens + carried.input_tokens,
            output_tokens=usage.output_tokens + carried.output_tokens,
            cached_tokens=usage.cached_tokens + carried.cached_tokens,
            cost_micros=cost,
            estimated=estimated or carried.output_tokens > 0,
            stream=request.stream,
            ttft_s=self.ttft_s,
            total_s=time.perf_counter() - exchange.began_s,
            attempts=self.num_attempts,
            outcome=self.outcome,
            request_id=exchange.request_id.decode("latin-1"),
        )
