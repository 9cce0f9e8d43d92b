"""One request's use of a model as a value, and what it costs."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.gateway.snapshot import Price

Outcome = Literal["ok", "error", "client_left", "truncated"]


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One request that had a key, when it was over."""

    time_s: float
    """Seconds since 1970."""
    key_id: str
    key_name: str
    model: str
    upstream: str
    upstream_model: str
    endpoint: str
    status: int
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Part of `input_tokens`."""
    cost_micros: int = 0
    estimated: bool = False
    """The tokens are our count, the upstream gave none."""
    stream: bool = False
    ttft_s: float | None = None
    total_s: float = 0.0
    attempts: int = 1
    outcome: Outcome = "ok"
    request_id: str = ""


def cost_micros(price: Price, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> int:
    """What the tokens cost, in micro-units, rounded to the nearest. `cached_tokens` are part of `input_tokens`."""
    if not price.is_any:
        return 0
    cached = max(0, min(cached_tokens, input_tokens))
    cached_price = price.cached_input_micros_per_mtok
    if cached_price is None:
        cached_price = price.input_micros_per_mtok
    total = (
        (input_tokens - cached) * price.input_micros_per_mtok
        + cached * cached_price
        + output_tokens * price.output_micros_per_mtok
    )
    return (total + 500_000) // 1_000_000
