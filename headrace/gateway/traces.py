"""Traces for OpenTelemetry: a span for a request, one below it for each attempt at an upstream, no word of a prompt.

    POST {endpoint}/v1/traces    OTLP as JSON, which every collector takes; so no library is needed

A client that sends `traceparent` decides whether its request is traced, for the others a share is drawn. Spans wait in
a bounded queue and go out every second or two; a collector that does not answer costs spans and never a request.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

import headrace
from headrace.gateway.genai_metrics import OPERATIONS
from headrace.gateway.snapshot import Tracing, Upstream
from headrace.gateway.upstream_client import BrokenAnswer, UpstreamClient
from headrace.gateway.upstream_errors import UpstreamFailure
from headrace.gateway.usage_event import UsageEvent

INTERVAL_S = 1.0
PATIENCE_S = 5.0
MAX_WAITING_SPANS = 10_000
SPANS_A_POST = 500
SERVER, CLIENT = 2, 3
"""Kinds of spans."""

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")

logger = logging.getLogger("headrace.gateway")

Span = dict[str, Any]


@dataclass(slots=True)
class _Attempt:
    span_id: str
    upstream: str
    model: str
    began_ns: int
    ended_ns: int = 0
    code: str | None = None


class Trace:
    """One request that is traced."""

    def __init__(self, trace_id: str, parent_id: str | None) -> None:
        self.trace_id = trace_id
        self._parent_id = parent_id
        self._span_id = _new_id(64)
        self._began_ns = time.time_ns()
        self._attempts: list[_Attempt] = []

    def attempt(self, upstream: str, model: str) -> bytes:
        """An attempt begins; the `traceparent` that goes with it."""
        attempt = _Attempt(_new_id(64), upstream, model, time.time_ns())
        self._attempts.append(attempt)
        return f"00-{self.trace_id}-{attempt.span_id}-01".encode()

    def ended(self, code: str | None) -> None:
        """The attempt is over. `code`: of the error that it came to."""
        self._attempts[-1].ended_ns = time.time_ns()
        self._attempts[-1].code = code

    def spans(self, event: UsageEvent, endpoint_path: str) -> list[Span]:
        now_ns = time.time_ns()
        operation = OPERATIONS.get(event.endpoint, event.endpoint)
        values: dict[str, str | int | bool] = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": event.model,
            "gen_ai.response.model": event.upstream_model,
            "gen_ai.usage.input_tokens": event.input_tokens,
            "gen_ai.usage.output_tokens": event.output_tokens,
            "http.request.method": "POST",
            "http.route": endpoint_path,
            "http.response.status_code": event.status,
            "headrace.request_id": event.request_id,
            "headrace.outcome": event.outcome,
            "headrace.upstream": event.upstream,
            "headrace.stream": event.stream,
            "headrace.key.name": event.key_name,
        }
        if event.ttft_s is not None:
            values["headrace.time_to_first_token_ms"] = round(event.ttft_s * 1000)
        name = f"{operation} {event.model}"
        failed = None if event.outcome in ("ok", "client_left") else event.outcome
        found = [self._span(self._span_id, self._parent_id, name, SERVER, self._began_ns, now_ns, values, failed)]
        for attempt in self._attempts:
            values = {"gen_ai.request.model": attempt.model, "headrace.upstream": attempt.upstream}
            ended_ns = attempt.ended_ns or now_ns
            name = f"{operation} at {attempt.upstream}"
            found.append(
                self._span(
                    attempt.span_id, self._span_id, name, CLIENT, attempt.began_ns, ended_ns, values, attempt.code
                )
            )
        return found

    def _span(
        self,
        span_id: str,
        parent_id: str | None,
        name: str,
        kind: int,
        began_ns: int,
        ended_ns: int,
        values: dict[str, str | int | bool],
        error: str | None,
    ) -> Span:
        span: Span = {
            "traceId": self.trace_id,
            "spanId": span_id,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(began_ns),
            "endTimeUnixNano": str(ended_ns),
            "attributes": _attributes({**values, **({"error.type": error} if error else {})}),
            "status": {"code": 2, "message": error} if error else {},
        }
        if parent_id is not None:
            span["parentSpanId"] = parent_id
        return span


class Tracer:
    """Decides what is traced, and sends it. Made on the loop that uses it."""

    def __init__(self, tracing: Tracing, draw: random.Random | None = None) -> None:
        self.num_dropped = 0
        self._tracing = tracing
        self._draw = draw or random.Random()
        self._waiting: deque[Span] = deque()
        collector = Upstream(name="the trace collector", base_url=tracing.endpoint, headers=tracing.headers)
        self._url = tracing.endpoint.rstrip("/") + "/v1/traces"
        self._client = UpstreamClient(collector)
        self._is_failing = False

    def begin(self, traceparent: bytes | None) -> Trace | None:
        """None for a request that is not traced."""
        match = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
        if match is not None and match[1].strip(b"0"):
            return Trace(match[1].decode(), match[2].decode()) if int(match[3], 16) & 1 else None
        return Trace(_new_id(128), None) if self._draw.random() < self._tracing.sample else None

    def take(self, spans: list[Span]) -> None:
        if len(self._waiting) + len(spans) > MAX_WAITING_SPANS:
            self.num_dropped += len(spans)
        else:
            self._waiting.extend(spans)

    async def run(self) -> None:
        """Until cancelled; what waits then is still sent."""
        try:
            while True:
                await asyncio.sleep(INTERVAL_S)
                while self._waiting:
                    await self._send()
        finally:
            if self._waiting:
                await self._send()
            await self._client.close()

    async def _send(self) -> None:
        spans = [self._waiting.popleft() for _ in range(min(SPANS_A_POST, len(self._waiting)))]
        resource = {"service.name": self._tracing.service_name, "service.version": headrace.__version__}
        scope = {"name": "headrace.gateway", "version": headrace.__version__}
        body = {
            "resourceSpans": [
                {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
            ]
        }
        headers = {b"content-type": b"application/json"}
        problem: str | None
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await self._client.send("POST", self._url, headers, msgspec.json.encode(body))
                try:
                    await answer.read_error()
                finally:
                    answer.close()
            problem = None if answer.status < 300 else f"it answers with the status {answer.status}"
        except UpstreamFailure as failure:
            problem = failure.error.message
        except (BrokenAnswer, TimeoutError):
            problem = f"no answer came within {PATIENCE_S:g} s"
        if problem is not None:
            self.num_dropped += len(spans)
            if not self._is_failing:
                logger.warning("Traces are lost: %s", problem)
        self._is_failing = problem is not None


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in values.items()]


def _value(value: str | int | bool) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


def _new_id(bits: int) -> str:
    return f"{random.getrandbits(bits) or 1:0{bits // 4}x}"
