"""How the gateway is, for monitoring: /health, /health/live, /health/ready, /metrics, and the root. No key needed.

/health/live: the process answers. /health/ready: it takes requests. /health tells what is in force and what is not
well, with status 200 as long as the gateway itself works: an upstream that is down is no reason to restart it.
"""

from __future__ import annotations

import time

import msgspec

import headrace
from headrace.gateway.exchange import Exchange
from headrace.gateway.metrics import CONTENT_TYPE
from headrace.gateway.paths import Kind
from headrace.gateway.state import GatewayState
from headrace.protocol import errors

_JSON = ((b"content-type", b"application/json"),)


async def answer(state: GatewayState, exchange: Exchange, kind: Kind) -> None:
    if kind == "metrics":
        return await exchange.answer(200, state.metrics.text(), ((b"content-type", CONTENT_TYPE.encode()),))
    if kind == "root":
        value: dict[str, object] = {"name": "headrace gateway", "version": headrace.__version__, "base_url": "/v1"}
    elif kind == "live":
        value = {"status": "ok"}
    elif state.is_draining:
        raise errors.gateway_draining()
    elif kind == "ready":
        value = {"status": "ok"}
    else:
        value = health(state)
    await exchange.answer(200, msgspec.json.encode(value), _JSON)


def health(state: GatewayState) -> dict[str, object]:
    """What /health says: names and states, no addresses and no keys."""
    now_s = time.monotonic()
    breakers = state.breakers.states(now_s)
    upstreams = {}
    for name, upstream in state.snapshot.upstreams.items():
        replicas = len(upstream.base_urls)
        healthy = sum(state.balancer.load(name, replica).healthy for replica in range(replicas))
        opened = sorted({model for (u, _, model), s in breakers.items() if u == name and s != "closed"})
        upstreams[name] = {"replicas": replicas, "healthy": healthy, "left_alone_for_models": opened}
    return {
        "status": "ok",
        "version": headrace.__version__,
        "config_generation": state.snapshot.generation,
        "config_error": state.reload_error,
        "requests_open": state.num_open,
        "upstreams": upstreams,
    }
