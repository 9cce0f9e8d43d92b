"""What the gateway counts for Prometheus, in a registry of its own.

Label values are models, upstreams and keys' first tags. An upstream may take any model name, so the names that clients
send are bounded here: after the first MAX_MODELS they are all `other`. A request costs one dictionary lookup and a few additions on children that are bound once;
what is only a state (breakers, requests in flight) is asked for when somebody reads /metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PREFIX = "headrace_gateway_"

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
WHOLE_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)

MAX_MODELS = 500
OTHER_MODEL = "other"

BreakerState = Literal["closed", "half_open", "open"]
BREAKER_VALUES: dict[str, int] = {"closed": 0, "half_open": 1, "open": 2}


class Outcome(Protocol):
    """The part of `usage.UsageEvent` that is counted."""

    @property
    def model(self) -> str: ...
    @property
    def upstream(self) -> str: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def outcome(self) -> str: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def cost_micros(self) -> int: ...
    @property
    def stream(self) -> bool: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def total_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class _Served:
    """The children of one (model, upstream, key tag)."""

    first_token: Histogram
    between: Histogram
    whole: Histogram
    input_tokens: Counter
    output_tokens: Counter
    cached_tokens: Counter
    cost: Counter


Breakers = Callable[[], Iterable[tuple[str, str, str]]]
"""(upstream, model, state) of each breaker that exists."""


class GatewayMetrics:
    """All metrics of one gateway process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.num_in_flight = 0
        self.config_generation = 0
        self.config_failures = 0
        self.breakers: Breakers = tuple
        self.usage_waiting: Callable[[], int] = int
        """Usage rows that are not in the database yet."""
        self.log_lines_dropped: Callable[[], int] = int
        served = ("model", "upstream", "key_tag")
        self._requests = self._counter(
            "requests", "Finished requests.", ("model", "upstream", "endpoint", "status", "outcome", "key_tag")
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to the first content, streams only.", served, FIRST_TOKEN_S
        )
        self._between = self._histogram(
            "inter_token_latency_seconds",
            "Mean time between two output tokens of a stream, one value a request.",
            served,
            BETWEEN_TOKENS_S,
        )
        self._whole = self._histogram("request_seconds", "Arrival to the last byte of the answer.", served, WHOLE_S)
        self._tokens = self._counter("tokens", "Tokens billed; cached_input is a part of input.", (*served, "kind"))
        self._cost = self._counter("cost_micros", "Cost in 1e-6 of the currency.", served)
        self._fallbacks = self._counter(
            "fallbacks", "Attempts that failed and were followed by another.", ("upstream", "model", "reason")
        )
        self._upstream_failures = self._counter(
            "upstream_failures", "Attempts that failed, followed by another or not.", ("upstream", "model", "reason")
        )
        self._refused = self._counter("refused", "Requests refused before any upstream.", ("code", "key_tag"))
        self._models: set[str] = set()
        self._request_children: dict[tuple[str, str, str, int, str, str], Counter] = {}
        self._served_children: dict[tuple[str, str, str], _Served] = {}
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    # what happens

    def finished(self, event: Outcome, key_tag: str = "") -> None:
        """A request that was let in has ended, however it ended."""
        model = self._bounded(event.model)
        key = (model, event.upstream, event.endpoint, event.status, event.outcome, key_tag)
        counter = self._request_children.get(key)
        if counter is None:
            counter = self._request_children[key] = self._requests.labels(*map(str, key))
        counter.inc()
        served = self._served(model, event.upstream, key_tag)
        served.whole.observe(event.total_s)
        if event.stream and event.ttft_s is not None:
            served.first_token.observe(event.ttft_s)
            if event.output_tokens > 1:
                served.between.observe((event.total_s - event.ttft_s) / (event.output_tokens - 1))
        if event.input_tokens:
            served.input_tokens.inc(event.input_tokens)
        if event.output_tokens:
            served.output_tokens.inc(event.output_tokens)
        if event.cached_tokens:
            served.cached_tokens.inc(event.cached_tokens)
        if event.cost_micros:
            served.cost.inc(event.cost_micros)

    def refused(self, code: str, key_tag: str = "") -> None:
        """A limit, a bad key, an unknown model: answered without asking any upstream. `code` from the error table."""
        self._refused.labels(code, key_tag).inc()

    def attempt_failed(self, upstream: str, model: str, reason: str, *, falls_back: bool) -> None:
        """`reason`: an error code of the table, such as upstream_unreachable."""
        model = self._bounded(model)
        self._upstream_failures.labels(upstream, model, reason).inc()
        if falls_back:
            self._fallbacks.labels(upstream, model, reason).inc()

    def text(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self.registry)

    # asked for by the registry

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(PREFIX + "requests_in_flight", "Requests being answered.", value=self.num_in_flight)
        breakers = GaugeMetricFamily(
            PREFIX + "breaker_state", "0 closed, 1 half open, 2 open.", labels=("upstream", "model")
        )
        for upstream, model, state in self.breakers():
            breakers.add_metric((upstream, model), BREAKER_VALUES[state])
        yield breakers
        yield GaugeMetricFamily(
            PREFIX + "usage_rows_waiting", "Usage rows not yet in the database.", value=self.usage_waiting()
        )
        yield GaugeMetricFamily(
            PREFIX + "config_generation", "Rises with each configuration taken.", value=self.config_generation
        )
        yield CounterMetricFamily(
            PREFIX + "config_failures", "Changed configurations that were refused.", value=self.config_failures
        )
        yield CounterMetricFamily(
            PREFIX + "log_lines_dropped", "Log lines that could not be written.", value=self.log_lines_dropped()
        )

    def _bounded(self, model: str) -> str:
        if model not in self._models:
            if len(self._models) >= MAX_MODELS:
                return OTHER_MODEL
            self._models.add(model)
        return model

    def _served(self, model: str, upstream: str, key_tag: str) -> _Served:
        key = (model, upstream, key_tag)
        served = self._served_children.get(key)
        if served is None:
            served = self._served_children[key] = _Served(
                self._first_token.labels(*key),
                self._between.labels(*key),
                self._whole.labels(*key),
                self._tokens.labels(*key, "input"),
                self._tokens.labels(*key, "output"),
                self._tokens.labels(*key, "cached_input"),
                self._cost.labels(*key),
            )
        return served

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self.registry)
