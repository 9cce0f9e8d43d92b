"""A request for a model, from its key to its bill.

    key ► body ► route ► may the key use the model? ► limits (all checked, then taken) ► attempts ► settle, always

Nothing here waits for a database. Whatever happens, `finally` books what was used, gives the slot back, and writes
one usage event and one log line.
"""

from __future__ import annotations

from headrace.gateway import logs
from headrace.gateway.attempts import Attempts
from headrace.gateway.exchange import ClientGone, Exchange
from headrace.gateway.keys import KeyRecord
from headrace.gateway.limits import Lease
from headrace.gateway.paths import Place
from headrace.gateway.prompt_log import Transcript
from headrace.gateway.request import Request, read
from headrace.gateway.route import Route, decide
from headrace.gateway.snapshot import Plan, Snapshot
from headrace.gateway.state import GatewayState
from headrace.gateway.usage_event import cost_micros
from headrace.protocol.errors import ApiError

UNLIMITED_OUTPUT_TOKENS = 256
"""What a budget reserves for the answer to a request that sets no limit itself."""


async def forward(state: GatewayState, snapshot: Snapshot, exchange: Exchange, place: Place, record: KeyRecord) -> None:
    """Answers the exchange. Raises ApiError while nothing was sent, ClientGone."""
    body = await exchange.body(snapshot.listen.max_body_bytes)
    request = read(exchange, place, body, record)
    plan = plan_of(snapshot, record)
    route = decide(snapshot, request.facts, request.fields)
    check_model(state, record, plan, request.facts.model, route)
    tokens = request.facts.prompt_tokens + (request.facts.max_tokens or 0) * request.facts.num_answers
    lease = state.limiter.admit(
        record,
        plan,
        estimated_tokens=tokens,
        estimated_micros=_estimated_micros(route, request),
        dialect="anthropic" if exchange.form == "anthropic" else "openai",
    )
    rate_headers = lease.headers()
    attempts = Attempts(state, snapshot, exchange, request, route, plan, rate_headers)
    transcript = None
    if record.prompts_kept_s is not None:
        transcript = Transcript()
        exchange.overhear(transcript.add)
    try:
        with exchange.leaving():
            await attempts.run()
    except ClientGone:
        attempts.progress.outcome = "client_left"
        raise
    except ApiError as error:
        if exchange.status is None:
            exchange.answer_headers += rate_headers
            error.headers = {n: v for n, v in error.headers.items() if not n.startswith(("x-ratelimit", "anthropic-r"))}
        await exchange.answer_error(error)
    finally:
        _settle(state, exchange, request, record, lease, attempts, transcript)


def plan_of(snapshot: Snapshot, record: KeyRecord) -> Plan | None:
    """The key's plan. Raises ApiError (403) when the configuration no longer has it: its limits must not fall away."""
    if record.plan is None:
        return None
    plan = snapshot.plans.get(record.plan)
    if plan is None:
        message = f"This API key belongs to the plan {record.plan}, which this gateway no longer has. Ask who runs it."
        raise ApiError(403, message, type="permission_error", code="plan_not_found")
    return plan


def check_model(state: GatewayState, record: KeyRecord, plan: Plan | None, asked: str | None, route: Route) -> None:
    """Raises ApiError (403) unless the key may use the model, by the name it asked for or by its own."""
    if not record.models and (plan is None or not plan.models):
        return
    if asked is not None and asked != route.model.name:
        try:
            state.keys.check_model(record, plan, asked)
            return
        except ApiError:
            pass
    state.keys.check_model(record, plan, route.model.name)


def _estimated_micros(route: Route, request: Request) -> int:
    facts = request.facts
    output_tokens = UNLIMITED_OUTPUT_TOKENS if facts.max_tokens is None else facts.max_tokens
    output_tokens *= facts.num_answers
    return max([cost_micros(a.price, facts.prompt_tokens, output_tokens) for a in route.attempts])


def _settle(
    state: GatewayState,
    exchange: Exchange,
    request: Request,
    record: KeyRecord,
    lease: Lease,
    attempts: Attempts,
    transcript: Transcript | None,
) -> None:
    progress = attempts.progress
    try:
        event = progress.event(exchange, request, record)
        lease.settle(event.input_tokens + event.output_tokens, event.cost_micros)
        state.usage.append(event)
        if attempts.trace is not None and state.tracer is not None:
            state.tracer.take(attempts.trace.spans(event, request.path))
        if transcript is not None and record.prompts_kept_s is not None:
            state.prompts.append(transcript.kept(event, record.prompts_kept_s, request.body))
        state.metrics.finished(event, record.tags[0] if record.tags else "")
        logs.log_request(
            logs.RequestLine(
                request_id=event.request_id,
                key=record.prefix,
                method=exchange.method,
                path=exchange.path,
                status=event.status,
                client=exchange.client_ip,
                traceparent=_text(exchange.headers.get(b"traceparent")),
                trace_id=attempts.trace.trace_id if attempts.trace is not None else None,
                model=event.model,
                upstream=event.upstream or None,
                upstream_model=event.upstream_model or None,
                outcome=event.outcome,
                causes=progress.causes or None,
                stream=event.stream,
                input_tokens=event.input_tokens,
                output_tokens=event.output_tokens,
                attempts=event.attempts,
                ttft_ms=None if event.ttft_s is None else round(event.ttft_s * 1000, 1),
                total_ms=round(event.total_s * 1000, 1),
            )
        )
    finally:
        lease.release()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
