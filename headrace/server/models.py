"""GET /v1/models and /v1/models/{id}: the served names, their limits, and the sampling defaults in effect.

A client that names an Anthropic version gets Anthropic's form, page by page; others OpenAI's. Codex, which asks with
its own version, looks for `models` and reads an empty list as "nothing to add".
"""

from __future__ import annotations

from headrace.protocol.translate.listings import ModelCard, anthropic_model, anthropic_models
from headrace.server.http import Exchange
from headrace.server.serving import Serving

PAGE, MAX_PAGE = 20, 1000
"""Models in an Anthropic list: without `limit`, and at most."""


async def list_models(serving: Serving, exchange: Exchange) -> None:
    names, query = serving.names.served, exchange.query
    if exchange.dialect == "messages":
        limit = query.get("limit", "")
        page = anthropic_models(
            [_anthropic_card(serving, name) for name in names],
            limit=min(max(int(limit), 1), MAX_PAGE)
            if limit.isascii() and limit.isdigit() and len(limit) < 10
            else PAGE,
            after_id=query.get("after_id"),
            before_id=query.get("before_id"),
        )
        return await exchange.answer_json(page)
    listed: dict[str, object] = {"object": "list", "data": [_card(serving, name) for name in names]}
    if "client_version" in query:
        listed["models"] = []
    await exchange.answer_json(listed)


async def retrieve_model(serving: Serving, exchange: Exchange, name: str) -> None:
    serving.names.check(name)
    served = name if name in serving.names.served else serving.names.primary
    if exchange.dialect == "messages":
        return await exchange.answer_json(anthropic_model(_anthropic_card(serving, served)))
    await exchange.answer_json(_card(serving, served))


def _anthropic_card(serving: Serving, name: str) -> ModelCard:
    info = serving.client.info
    return ModelCard(
        id=name, created_s=serving.started_at, context_window=info.max_model_len if info is not None else None
    )


def _card(serving: Serving, name: str) -> dict[str, object]:
    info = serving.client.info
    max_model_len = info.max_model_len if info is not None else None
    chat = serving.chat
    metadata = {
        "default_sampling": serving.sampling_defaults,
        "chat_template": chat is not None,
        "tool_call_parser": chat.calls.name if chat is not None and chat.calls is not None else None,
        "reasoning_parser": chat.reasoning.name if chat is not None and chat.reasoning is not None else None,
        "gives": info.gives if info is not None else None,
        "dtype": info.dtype if info is not None else None,
        "max_model_len": max_model_len,
        "step_time_target_s": info.step_time_target_s if info is not None else None,
    }
    return {
        "id": name,
        "object": "model",
        "created": serving.started_at,
        "owned_by": "headrace",
        "root": serving.settings.model_path,
        "parent": None,
        "max_model_len": max_model_len,
        "metadata": metadata,
    }
