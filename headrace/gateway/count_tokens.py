"""`POST /messages/count_tokens`: the upstream's own count where it has one, else an estimate.

Anthropic's servers have it, and Headrace and vLLM with the model's own tokenizer. Who turns out not to have it is not
asked again. An estimate says so in the header `x-gateway-estimated`; what the upstream finds malformed is not
estimated. Whatever happens here, no breaker hears of it.
"""

from __future__ import annotations

import asyncio

import msgspec

from headrace.gateway import headers
from headrace.gateway.exchange import Exchange
from headrace.gateway.forward import check_model, plan_of
from headrace.gateway.keys import KeyRecord
from headrace.gateway.paths import Place
from headrace.gateway.request import Request, read
from headrace.gateway.route import Attempt, decide
from headrace.gateway.snapshot import Snapshot, Upstream
from headrace.gateway.state import GatewayState
from headrace.gateway.upstream_client import BrokenAnswer
from headrace.gateway.upstream_errors import UpstreamFailure, error_fields, from_status, lacks_endpoint

PATIENCE_S = 10.0
_JSON = (b"content-type", b"application/json")


async def count_tokens(
    state: GatewayState, snapshot: Snapshot, exchange: Exchange, place: Place, record: KeyRecord
) -> None:
    """Raises ApiError for a model that does not exist or that the key may not use, and for a malformed request."""
    request = read(exchange, place, await exchange.body(snapshot.listen.max_body_bytes), record)
    facts = msgspec.structs.replace(request.facts, endpoint="messages", max_tokens=None)
    route = decide(snapshot, facts)
    check_model(state, record, plan_of(snapshot, record), facts.model, route)
    first = route.attempts[0]
    counted = await _asked(state, request, first) if _may_count(state, first.upstream) else None
    if counted is not None:
        return await exchange.answer(200, counted, [_JSON])
    body = msgspec.json.encode({"input_tokens": max(1, facts.prompt_tokens)})
    await exchange.answer(200, body, [_JSON, (b"x-gateway-estimated", b"true")])


def _may_count(state: GatewayState, upstream: Upstream) -> bool:
    if upstream.dialect == "anthropic":
        return True
    return upstream.extended_sampling and upstream.name not in state.without_count_tokens


async def _asked(state: GatewayState, request: Request, attempt: Attempt) -> bytes | None:
    """The upstream's answer, None where it gives none. Raises ApiError (400) where it says what is wrong."""
    upstream = attempt.upstream
    sent = headers.forwarded(
        request.sent_headers, request.request_id, dialect="anthropic", content_type=b"application/json"
    )
    assert request.fields is not None
    body = request.fields.changed({} if request.facts.model == attempt.model else {"model": attempt.model})
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await state.clients.of(upstream).send("POST", upstream.url(request.path), sent, body)
            try:
                found = await answer.read_whole(1 << 20)
            finally:
                answer.close()
        if lacks_endpoint(answer.status, found):
            state.without_count_tokens.add(upstream.name)
        if answer.status == 400 and error_fields(found):
            refused = from_status(upstream, answer.status, answer.headers, found).error
            if refused.code not in ("model_not_found", "context_length_exceeded"):
                raise refused
        count = msgspec.json.decode(found, type=dict[str, msgspec.Raw])
    except (UpstreamFailure, BrokenAnswer, TimeoutError, msgspec.MsgspecError):
        return None
    return found if answer.status == 200 and "input_tokens" in count else None
