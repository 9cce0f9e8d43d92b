"""The attempt loop: one upstream after the other until one answers.

    first upstream ──fails──► again, at most max_retries (another replica, a short wait) ──fails──► next upstream ...

A failure before the first content is never seen by the client. What the caller did wrong (most 4xx) is answered at
once, and after the first content there is no second attempt. If all fail, the client gets the last one's cause.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from headrace.gateway import headers, upstream_errors
from headrace.gateway.breaker import Breaker
from headrace.gateway.continuation import Record, Said, continued, may_continue, takes_over
from headrace.gateway.delivery import Delivery
from headrace.gateway.exchange import Exchange
from headrace.gateway.progress import Progress
from headrace.gateway.request import Request, call_for
from headrace.gateway.route import Attempt, Route
from headrace.gateway.snapshot import Plan, Snapshot
from headrace.gateway.state import GatewayState
from headrace.gateway.traces import Trace
from headrace.gateway.upstream_client import UpstreamAnswer
from headrace.gateway.upstream_errors import UpstreamFailure
from headrace.protocol.errors import ApiError, gateway_draining

RETRY_AFTER_BUDGET_S = 2.0
"""A 429 that asks for a longer wait goes to the next upstream."""
BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class _NoResponsesApi(Exception):
    """The upstream has turned out to have no /responses."""


class _Broken(NamedTuple):
    """An answer that broke in the middle and that somebody else may go on with."""

    said: Said
    delivery: Delivery
    replica: int
    error: ApiError


class Attempts:
    """The attempts of one request."""

    def __init__(
        self,
        state: GatewayState,
        snapshot: Snapshot,
        exchange: Exchange,
        request: Request,
        route: Route,
        plan: Plan | None,
        rate_headers: headers.RawHeaders,
    ) -> None:
        self.state = state
        self.snapshot = snapshot
        self.exchange = exchange
        self.request = request
        self.route = route
        self.plan = plan
        self.progress = Progress(route)
        self._rate_headers = rate_headers
        self.trace: Trace | None = None
        if state.tracer is not None:
            self.trace = state.tracer.begin(exchange.headers.get(b"traceparent"))
        self._continues = snapshot.continues_streams and request.stream and may_continue(request)
        self._broken: _Broken | None = None

    async def run(self) -> None:
        """Answers the exchange. Raises ApiError when no upstream did."""
        if self.request.stream:
            self.exchange.open_after(self.snapshot.listen.hold_back_s, self._announce)
        failure: UpstreamFailure | None = None
        for place, attempt in enumerate(self.route.attempts):
            is_last = place == len(self.route.attempts) - 1
            failure = await self._at(attempt, failure, is_last)
            if failure is None:
                if self._broken is not None:
                    await self._go_on(self._broken, place)
                return
            if not failure.falls_back:
                break
        raise self._final(failure)

    async def _go_on(self, broken: _Broken, place: int) -> None:
        """Have somebody else say the rest: the next upstream that can, else the same one; once."""
        failed = self.route.attempts[place]
        now_s = time.monotonic()
        for attempt in (*self.route.attempts[place + 1 :], failed):
            if not takes_over(attempt):
                continue
            replicas = [*self._replicas(attempt)]
            if attempt is failed:
                replicas.sort(key=lambda replica: replica == broken.replica)
            for replica in replicas:
                breaker = self.state.breakers.of((attempt.upstream.name, replica, attempt.model))
                if breaker.allows(now_s):
                    self.progress.carry(self.request)
                    try:
                        return await self._once(attempt, replica, breaker, broken.said)
                    except UpstreamFailure as failure:
                        self.progress.causes.append(f"{attempt.upstream.name}:{failure.error.code}")
                        self.state.metrics.attempt_failed(
                            attempt.upstream.name, attempt.model, _reason(failure), falls_back=False
                        )
                        return await broken.delivery.break_off(broken.error)
        await broken.delivery.break_off(broken.error)

    async def _at(self, attempt: Attempt, before: UpstreamFailure | None, is_last: bool) -> UpstreamFailure | None:
        """Ask one upstream, again where that may help. None = answered; else why not."""
        upstream = attempt.upstream
        replicas = self._replicas(attempt)
        failure = before
        num_tries = 0
        for number in range(max(upstream.max_retries + 1, len(replicas))):
            replica = replicas[number % len(replicas)]
            breaker = self.state.breakers.of((upstream.name, replica, attempt.model))
            if not breaker.allows(time.monotonic()):
                if number + 1 >= len(replicas):
                    break
                continue
            if num_tries and replica == replicas[(number - 1) % len(replicas)]:
                await self._pause(num_tries, failure)
            num_tries += 1
            try:
                await self._once(attempt, replica, breaker)
                return None
            except UpstreamFailure as error:
                failure = error
                repeats = error.repeats and number < upstream.max_retries and _wait_s(error) <= RETRY_AFTER_BUDGET_S
                repeats = repeats or (error.elsewhere and number + 1 < len(replicas))
                self.progress.causes.append(f"{upstream.name}:{error.error.code}")
                self.state.metrics.attempt_failed(
                    upstream.name,
                    attempt.model,
                    _reason(error),
                    falls_back=error.falls_back and (repeats or not is_last),
                )
                if not repeats:
                    break
        if failure is before:  # its breakers let nothing through
            return before or UpstreamFailure(upstream_errors.none_healthy(self.route.model.name))
        return failure

    def _replicas(self, attempt: Attempt) -> Sequence[int]:
        upstream = attempt.upstream
        if len(upstream.replicas) < 2:
            return (0,)
        return self.state.balancer.order(upstream.name, len(upstream.replicas), self.request.affinity(self.plan))

    async def _pause(self, num_tries: int, failure: UpstreamFailure | None) -> None:
        backoff_s = min(BACKOFF_S * 2 ** (num_tries - 1), MAX_BACKOFF_S) * random.uniform(0.8, 1.2)
        await asyncio.sleep(max(backoff_s, _wait_s(failure)))

    async def _once(self, attempt: Attempt, replica: int, breaker: Breaker, before: Said | None = None) -> None:
        """One request to one replica. Raises UpstreamFailure when it came to nothing.

        `before`: what the client has of an answer that broke, and that this one goes on with.
        """
        progress, upstream = self.progress, attempt.upstream
        progress.attempt = attempt
        progress.num_attempts += 1
        balancer = self.state.balancer if len(upstream.replicas) > 1 else None
        if balancer is not None:
            balancer.began(upstream.name, replica)
        verdict: bool | None = None
        first_s: float | None = None
        try:
            try:
                broken = await self._ask(attempt, replica, before)
            except _NoResponsesApi:
                broken = await self._ask(attempt, replica, before)
            first_s = progress.ttft_s if self.request.stream else time.perf_counter() - self.exchange.began_s
            verdict = broken is None
        except UpstreamFailure as failure:
            if failure.counts:
                verdict = False
            elif failure.error.status < 500 and failure.error.status != 429:
                verdict = True  # it works, the request was wrong
            raise
        finally:
            if balancer is not None:
                balancer.ended(upstream.name, replica, first_s)
            if verdict is None:
                breaker.released()
            elif verdict:
                breaker.succeeded(time.monotonic())
            else:
                breaker.failed(time.monotonic())
        if broken is None:
            progress.outcome = "ok"
            return
        progress.outcome = "truncated"
        progress.causes.append(f"{upstream.name}:{broken.code}")
        falls_back = self._broken is not None
        self.state.metrics.attempt_failed(upstream.name, attempt.model, broken.code or "", falls_back=falls_back)

    async def _ask(self, attempt: Attempt, replica: int, before: Said | None) -> ApiError | None:
        """None = answered; an error = broke after the first content. Raises UpstreamFailure before that."""
        upstream, progress, state = attempt.upstream, self.progress, self.state
        try:
            call = call_for(
                self.request,
                attempt,
                self.route.model,
                self.plan,
                self.snapshot,
                native_responses=before is None and upstream.name not in state.without_responses,
            )
        except ApiError as error:  # this upstream's dialect has no words for it; another's may
            raise UpstreamFailure(error, counts=False) from None
        if before is not None:
            continuation = continued(call, before)
            if continuation is None:
                raise UpstreamFailure(upstream_errors.cannot_go_on(upstream), counts=False)
            call = continuation
        client = state.clients.of(upstream)
        sent_headers = call.headers
        if self.trace is not None:
            sent_headers = {**sent_headers, b"traceparent": self.trace.attempt(upstream.name, attempt.model)}
        url = client.url(call.path, replica)
        if self.request.query and call.translation is None:
            url += "?" + self.request.query.decode("latin-1")
        delivery: Delivery | None = None
        answer: UpstreamAnswer | None = None
        failed: str | None = None
        progress.reached = True
        try:
            with state.deadlines.limit(upstream, self.exchange, stream=self.request.stream) as deadline:
                answer = await client.send("POST", url, sent_headers, call.body)
                if not 200 <= answer.status < 300:
                    body = await answer.read_error()
                    if call.path == "/responses" and upstream_errors.lacks_endpoint(answer.status, body):
                        state.without_responses.add(upstream.name)  # chat completions stand in for it
                        raise _NoResponsesApi
                    raise upstream_errors.from_status(upstream, answer.status, answer.headers, body)
                named = self.gateway_headers()
                named += headers.ignored(answer.headers, call.translation.dropped if call.translation else ())
                record = Record() if self._continues and before is None and call.wire == "openai" else None
                delivery = Delivery(
                    self.exchange, self.request, call, upstream, deadline, progress, named, record=record, before=before
                )
                await delivery.deliver(answer)
                return None
        except UpstreamFailure as failure:
            failed = failure.error.code or str(failure.error.status)
            if delivery is not None and delivery.committed:
                said = delivery.said() if failure.falls_back and not deadline.is_over else None
                if said is not None:
                    self._broken = _Broken(said, delivery, replica, failure.error)
                else:
                    await delivery.break_off(failure.error)
                return failure.error
            progress.reached = False
            raise
        except asyncio.CancelledError:
            if self.exchange.client_left and delivery is not None and answer is not None:
                await delivery.await_usage(answer)
            if self.exchange.client_left or delivery is None or not delivery.committed:
                raise
            ending = gateway_draining()
            await delivery.break_off(ending)
            return ending
        finally:
            if self.trace is not None:
                self.trace.ended(failed)
            if answer is not None:
                if progress.watch is not None and progress.watch.ended and not self.exchange.client_left:
                    answer.finish()
                else:
                    answer.close()

    def _announce(self) -> list[tuple[bytes, bytes]]:
        """What a stream says that begins before anything of the answer is there."""
        self.progress.announced = self.progress.attempt
        return self.gateway_headers()

    def gateway_headers(self) -> list[tuple[bytes, bytes]]:
        """What the answer says about its way here."""
        attempt = self.progress.attempt
        return [
            (b"x-gateway-attempts", b"%d" % self.progress.num_attempts),
            (b"x-gateway-config-generation", b"%d" % self.snapshot.generation),
            *(headers.way(attempt.upstream.name, attempt.model) if attempt is not None else ()),
            *self._rate_headers,
        ]

    def _final(self, failure: UpstreamFailure | None) -> ApiError:
        error = failure.error if failure is not None else upstream_errors.none_healthy(self.route.model.name)
        for name, value in self.gateway_headers():
            error.headers[name.decode("latin-1")] = value.decode("latin-1")
        if self.progress.num_attempts > 1:
            error.headers["x-should-retry"] = "false"
        return error


def _reason(failure: UpstreamFailure) -> str:
    """A label of metrics: codes that an upstream makes up are told by their status."""
    if failure.falls_back and failure.error.code is not None:
        return failure.error.code
    return f"status_{failure.error.status}"


def _wait_s(failure: UpstreamFailure | None) -> float:
    return failure.retry_after_s or 0.0 if failure is not None else 0.0
