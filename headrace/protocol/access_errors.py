"""The part of the error table that keys bring with them: who may not, who may not this, and who has had enough.

A 401 names its cause and what helps (a page for keys, where there is one), because "invalid key" is what people
search for longest. Nothing here repeats what was sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from headrace.protocol.errors import MAX_QUOTED_CHARS, ApiError

API_KEYS_PAGE = "/api-keys"
"""Where a gateway with pages has the one for keys."""


def shown_date(time_s: float) -> str:
    """2026-12-24 18:00 UTC"""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


# 401: who asks


def no_key(page: str | None) -> ApiError:
    return _unauthorized(
        "missing_api_key",
        "No API key was sent. Send the header `Authorization: Bearer <your key>` (or `x-api-key: <your key>`). If a "
        "variable should hold the key, look whether it is exported where the program runs.",
        page,
    )


def malformed_key(detail: str, page: str | None) -> ApiError:
    return _unauthorized(
        "malformed_authorization",
        f"The Authorization header is not understood: {detail} It must read `Authorization: Bearer <your key>`.",
        page,
    )


def unknown_key(hint: str, page: str | None) -> ApiError:
    return _unauthorized("invalid_api_key", f"The API key is not one of this gateway's keys. {hint}", page)


def key_expired(expired_at_s: float, page: str | None) -> ApiError:
    message = f"The API key expired on {shown_date(expired_at_s)}. Make a new one and put it in its place."
    return _unauthorized("key_expired", message, page)


def key_replaced(until_s: float, page: str | None) -> ApiError:
    message = (
        f"The API key was replaced by a rotation and stopped working on {shown_date(until_s)}. Use the new one, "
        "or rotate the key again if nobody has it."
    )
    return _unauthorized("key_expired", message, page)


def key_revoked(revoked_at_s: float, page: str | None) -> ApiError:
    message = f"The API key was revoked on {shown_date(revoked_at_s)}. Use another one, or make a new one."
    return _unauthorized("key_revoked", message, page)


def _unauthorized(code: str, message: str, page: str | None) -> ApiError:
    place = f"on {page} or " if page is not None else ""
    advice = f" Keys are made {place}with `headrace key create`."
    return ApiError(401, message + advice, code=code, headers={"www-authenticate": "Bearer"})


# 403: what this key may not


def ip_not_allowed(address: str | None) -> ApiError:
    sender = f"the address {address[:MAX_QUOTED_CHARS]}" if address else "an unknown address"
    message = f"This API key may not be used from {sender}: the key's list of allowed addresses does not have it."
    return ApiError(403, message, type="permission_error", code="ip_not_allowed")


def model_not_allowed(name: str, of: str, allowed: str) -> ApiError:
    """`of`: "API key" or "plan coding"."""
    message = f"This {of} may not use the model `{name[:MAX_QUOTED_CHARS]}`; it may use: {allowed}."
    return ApiError(403, message, type="permission_error", code="model_not_allowed", param="model")


# 429: who has had enough


def rate_limit_exceeded(message: str, retry_after_s: float | None, headers: Mapping[str, str]) -> ApiError:
    """`retry_after_s` None: waiting does not help."""
    waits = _retry_headers(retry_after_s)
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers={**headers, **waits})


def concurrency_exceeded(message: str, headers: Mapping[str, str]) -> ApiError:
    return ApiError(
        429, message, type="rate_limit_error", code="concurrency_exceeded", headers={**headers, **_retry_headers(1.0)}
    )


def insufficient_quota(message: str, retry_after_s: float | None, headers: Mapping[str, str]) -> ApiError:
    """A budget is used up: SDKs must not try again by themselves. `retry_after_s` None: it is never renewed."""
    waits = {} if retry_after_s is None else {"retry-after": str(_seconds(retry_after_s))}
    return ApiError(
        429,
        message,
        type="insufficient_quota",
        code="insufficient_quota",
        headers={**headers, **waits, "x-should-retry": "false"},
    )


def _retry_headers(retry_after_s: float | None) -> dict[str, str]:
    if retry_after_s is None:
        return {"x-should-retry": "false"}
    return {"retry-after": str(_seconds(retry_after_s)), "retry-after-ms": str(max(1, math.ceil(retry_after_s * 1000)))}


def _seconds(seconds: float) -> int:
    return max(1, math.ceil(seconds))
