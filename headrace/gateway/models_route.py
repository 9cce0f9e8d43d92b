"""`GET /models` and `/models/{id}`: the models that this key may call, in the shape that the client reads.

OpenAI's {"object": "list", "data": [...]}; with an `anthropic-version` header Anthropic's; and always a key `models`
beside `data`, because Codex reads that one.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.gateway.exchange import Exchange
from headrace.gateway.forward import plan_of
from headrace.gateway.keys import KeyRecord, matches_any
from headrace.gateway.route import model_names, resolve_alias
from headrace.gateway.snapshot import Model, Plan, Snapshot
from headrace.gateway.state import GatewayState
from headrace.protocol.errors import model_not_found

_JSON = ((b"content-type", b"application/json"),)
_encode = msgspec.json.Encoder().encode


async def list_models(state: GatewayState, snapshot: Snapshot, exchange: Exchange, record: KeyRecord) -> None:
    names = visible(snapshot, record, plan_of(snapshot, record))
    if b"anthropic-version" in exchange.headers:
        data = [_anthropic(state, snapshot, name) for name in names]
        ends = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return await exchange.answer(200, _encode({"data": data, **ends}), _JSON)
    data = [_openai(state, snapshot, name) for name in names]
    models = [_codex(snapshot, name) for name in names]
    await exchange.answer(200, _encode({"object": "list", "data": data, "models": models}), _JSON)


async def one_model(state: GatewayState, snapshot: Snapshot, exchange: Exchange, record: KeyRecord, name: str) -> None:
    """Raises ApiError (404) for a name that the key does not see."""
    names = visible(snapshot, record, plan_of(snapshot, record))
    if name not in names:
        raise model_not_found(name, names)
    shape = _anthropic if b"anthropic-version" in exchange.headers else _openai
    await exchange.answer(200, _encode(shape(state, snapshot, name)), _JSON)


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


def _model(snapshot: Snapshot, name: str) -> Model:
    model = resolve_alias(snapshot, name)
    return snapshot.models.get(model) or Model(name=model)


def _openai(state: GatewayState, snapshot: Snapshot, name: str) -> dict[str, Any]:
    model = _model(snapshot, name)
    owner = model.targets[0].upstream if model.targets else "headrace"
    entry: dict[str, Any] = {"id": name, "object": "model", "created": int(state.started_s), "owned_by": owner}
    if model.display_name:
        entry["display_name"] = model.display_name
    if model.context_window is not None:
        entry["context_window"] = entry["max_model_len"] = model.context_window
    return entry


def _anthropic(state: GatewayState, snapshot: Snapshot, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(int(state.started_s), UTC).isoformat().replace("+00:00", "Z")
    shown = _model(snapshot, name).display_name or name
    return {"type": "model", "id": name, "display_name": shown, "created_at": created}


def _codex(snapshot: Snapshot, name: str) -> dict[str, Any]:
    model = _model(snapshot, name)
    return {
        "slug": name,
        "id": name,
        "display_name": model.display_name or name,
        **({"context_window": model.context_window} if model.context_window is not None else {}),
    }
