"""GET /v1/models and /v1/models/{id}: the served names, their limits, and the sampling defaults in effect."""

from __future__ import annotations

from headrace.server.http import Exchange
from headrace.server.serving import Serving


async def list_models(serving: Serving, exchange: Exchange) -> None:
    await exchange.answer_json({"object": "list", "data": [_card(serving, name) for name in serving.names.served]})


async def retrieve_model(serving: Serving, exchange: Exchange, name: str) -> None:
    serving.names.check(name)
    served = name if name in serving.names.served else serving.names.primary
    await exchange.answer_json(_card(serving, served))


def _card(serving: Serving, name: str) -> dict[str, object]:
    info = serving.client.info
    max_model_len = info.max_model_len if info is not None else None
    metadata = {
        "default_sampling": serving.sampling_defaults,
        "chat_template": serving.chat is not None,
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
