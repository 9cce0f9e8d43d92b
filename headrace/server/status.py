"""Routes that say how the server is.

/health is about life: 200 while the engine makes progress, or sleeps as it was told. /ready is about work: 200 while
new requests are taken, so it is 503 while loading, restarting, sleeping and draining.
"""

from __future__ import annotations

import headrace
from headrace.protocol import errors
from headrace.server.http import Exchange
from headrace.server.metrics import CONTENT_TYPE
from headrace.server.serving import Serving


async def health(serving: Serving, exchange: Exchange) -> None:
    if serving.client.healthy:
        asleep = serving.client.state == "sleeping"
        return await exchange.answer_json({"status": "sleeping"} if asleep else {})
    stuck = errors.unavailable("engine_stuck", "Requests are waiting and the engine has not finished a step for long.")
    await exchange.answer_error(serving.not_ready() or stuck)


async def ready(serving: Serving, exchange: Exchange) -> None:
    refusal = serving.not_ready()
    if refusal is not None:
        return await exchange.answer_error(refusal)
    await exchange.answer_json({"status": "ready"})


async def ping(serving: Serving, exchange: Exchange) -> None:
    await health(serving, exchange)


async def version(serving: Serving, exchange: Exchange) -> None:
    await exchange.answer_json({"version": headrace.__version__})


async def load(serving: Serving, exchange: Exchange) -> None:
    await exchange.answer_json({"server_load": serving.num_generating})


async def metrics(serving: Serving, exchange: Exchange) -> None:
    await exchange.answer(200, serving.metrics.render(), CONTENT_TYPE)


async def root(serving: Serving, exchange: Exchange) -> None:
    await exchange.answer_json(
        {"name": "headrace", "version": headrace.__version__, "model": serving.names.primary, "docs": "/docs"}
    )
