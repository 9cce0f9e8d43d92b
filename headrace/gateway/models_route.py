"""`GET /models` and `/models/{id}`: the models that this key may call, in the shape that the client reads.

With an `anthropic-version` header that is Anthropic's, page by page; otherwise OpenAI's.
"""

from __future__ import annotations

from urllib.parse import parse_qsl

import msgspec

from headrace.gateway.exchange import Exchange
from headrace.gateway.forward import plan_of
from headrace.gateway.keys import KeyRecord, matches_any
from headrace.gateway.route import model_names, resolve_alias
from headrace.gateway.snapshot import Model, Plan, Snapshot
from headrace.gateway.state import GatewayState
from headrace.protocol.errors import model_not_found
from headrace.protocol.translate import listings
from headrace.protocol.translate.listings import ModelCard

PAGE, MAX_PAGE = 20, 1000
"""Models in an Anthropic list: without `limit`, and at most."""

_encode = msgspec.json.Encoder().encode


async def list_models(state: GatewayState, snapshot: Snapshot, exchange: Exchange, record: KeyRecord) -> None:
    names = visible(snapshot, record, plan_of(snapshot, record))
    cards = [_card(state, snapshot, name) for name in names]
    if b"anthropic-version" not in exchange.headers:
        return await exchange.answer(200, _encode(listings.openai_models(cards)))
    asked = dict(parse_qsl(exchange.query.decode("latin-1")))
    limit = asked.get("limit", "")
    page = listings.anthropic_models(
        cards,
        limit=min(max(int(limit), 1), MAX_PAGE) if limit.isascii() and limit.isdigit() and len(limit) < 10 else PAGE,
        after_id=asked.get("after_id"),
        before_id=asked.get("before_id"),
    )
    await exchange.answer(200, _encode(page))


async def one_model(state: GatewayState, snapshot: Snapshot, exchange: Exchange, record: KeyRecord, name: str) -> None:
    """Raises ApiError (404) for a name that the key does not see."""
    names = visible(snapshot, record, plan_of(snapshot, record))
    if name not in names:
        raise model_not_found(name, names)
    shape = listings.anthropic_model if b"anthropic-version" in exchange.headers else listings.openai_model
    await exchange.answer(200, _encode(shape(_card(state, snapshot, name))))


def visible(snapshot: Snapshot, record: KeyRecord, plan: Plan | None) -> list[str]:
    """The names that the key may send: by their own name or as an alias of a model that it may call."""
    plan_models = plan.models if plan is not None else ()

    def allows(name: str) -> bool:
        return matches_any(name, record.models) and matches_any(name, plan_models)

    every = model_names(snapshot)
    known = set(every)
    for upstream in snapshot.upstreams.values():
        if upstream.name == snapshot.default_upstream:
            every += [model for model in upstream.models if model not in known]
    return [name for name in every if allows(name) or allows(resolve_alias(snapshot, name))]


def _card(state: GatewayState, snapshot: Snapshot, name: str) -> ModelCard:
    resolved = resolve_alias(snapshot, name)
    model = snapshot.models.get(resolved) or Model(name=resolved)
    return ModelCard(
        id=name,
        display_name=model.display_name,
        created_s=int(state.started_s),
        context_window=model.context_window,
        owned_by=model.targets[0].upstream if model.targets else "headrace",
    )
