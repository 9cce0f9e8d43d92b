"""Errors between dialects: what an upstream's error means, and how each dialect says one of ours.

One ApiError, three bodies: OpenAI's {"error": {...}}, Anthropic's {"type": "error", ...}, and the failed event
of a responses stream. Nothing of an upstream's 401 reaches the caller as 401: the caller's key was fine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.protocol.errors import ApiError
from headrace.protocol.translate import wire
from headrace.protocol.translate.events import Dialect
from headrace.protocol.translate.wire import Json

MAX_MESSAGE_CHARS = 2000

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "timeout_error": 504,
    "overloaded_error": 503,
    "server_overloaded": 503,
    "BadRequestError": 400,
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
}
_RESPONSES_CODES = ("context_length_exceeded", "insufficient_quota", "rate_limit_exceeded", "invalid_prompt")
_OVERFLOW = ("maximum context length", "context window", "prompt is too long", "context_length", "exceed_context_size")


def stream_truncated() -> ApiError:
    message = "The upstream's answer broke off before its end; what was received so far is not the whole answer."
    return ApiError(502, message, type="upstream_error", code="upstream_stream_truncated")


def invalid_answer(detail: str) -> ApiError:
    message = f"The upstream answered with something that is not an answer: {detail}"
    return ApiError(502, message, type="upstream_error", code="upstream_invalid_response")


def upstream_failure(status: int, body: bytes) -> ApiError:
    """What an upstream's error answer means to the caller; `body` in any dialect, HTML or empty."""
    try:
        found = msgspec.json.decode(body) if body.strip() else None
    except (msgspec.DecodeError, RecursionError):
        found = None
    return failure_of(status, found)


def failure_in(event: Json) -> ApiError | None:
    """The error that a data object of a stream, or an answer with status 200, is in truth; None for none.

    `{"error": {...}}`, `{"object": "error", ...}` and `{"type": "error", ...}` are errors in every dialect."""
    if event.get("error") or event.get("object") == "error" or event.get("type") == "error":
        return failure_of(None, event)
    return None


def failure_of(status: int | None, found: Any) -> ApiError:
    """`status` None: the error came inside a 200, and what it calls itself decides."""
    error = wire.at(found, "error")
    told = error if isinstance(error, dict) else found if isinstance(found, dict) else {}
    if status is None:
        names = [name for name in (told.get("type"), told.get("code")) if isinstance(name, str)]
        named = [_STATUS_OF_TYPE[name] for name in names if name in _STATUS_OF_TYPE]
        number = told.get("code")
        status = number if isinstance(number, int) and 400 <= number < 600 else (*named, 502)[0]
    message = _message_of(error, told) or f"The upstream answered with status {status} and no error message."
    message = message[:MAX_MESSAGE_CHARS]
    param = told.get("param") if isinstance(told.get("param"), str) else None
    code = told.get("code") if isinstance(told.get("code"), str) else None
    if status in (400, 413, 422) and any(sign in f"{code} {message}".lower() for sign in _OVERFLOW):
        return ApiError(400, message, code="context_length_exceeded", param=param)
    match status:
        case 401 | 403:
            hidden = (
                f"The upstream refused the gateway's own credentials with status {status}. Your key is fine; whoever "
                "runs this gateway has to correct the upstream's api_key."
            )
            return ApiError(502, hidden, type="upstream_error", code="upstream_auth_failed")
        case 429:
            quota = code == "insufficient_quota" or told.get("type") == "insufficient_quota"
            return ApiError(
                429,
                message,
                type="insufficient_quota" if quota else "rate_limit_error",
                code="insufficient_quota" if quota else "rate_limit_exceeded",
            )
        case 404:
            return ApiError(404, message, code=code or "model_not_found", param=param)
        case 408 | 504:
            return ApiError(504, message, type="upstream_error", code="upstream_timeout")
        case 503 | 529:
            return ApiError(503, message, type="server_error", code=code or "upstream_overloaded")
        case _ if 400 <= status < 500:
            return ApiError(status, message, code=code or "upstream_rejected", param=param)
        case _:
            return ApiError(502, message, type="upstream_error", code=code or "upstream_failed")


def _message_of(error: object, told: Json) -> str | None:
    if isinstance(error, str):
        return error
    for name in ("message", "detail", "msg"):
        value = told.get(name)
        if isinstance(value, str) and value:
            return value
        if value:
            return wire.encode_text(value)
    return None


# saying one of ours


def anthropic_type(error: ApiError) -> str:
    return _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")


def anthropic_payload(error: ApiError, request_id: str | None) -> Json:
    """`code` and the outer `message` are ours beside what Anthropic has: the same words as in OpenAI's form."""
    told = {"type": anthropic_type(error), "message": error.message, "code": error.code}
    return {"type": "error", "error": told, "request_id": request_id, "message": error.message}


def responses_error(error: ApiError) -> Json:
    """`response.error` of a failed response; its codes are a closed list in the SDKs and in Codex."""
    if error.code in _RESPONSES_CODES:
        code = error.code
    elif error.status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if 400 <= error.status < 500 else "server_error"
    return {"code": code, "message": error.message}


def error_payload(dialect: Dialect, error: ApiError, request_id: str | None = None) -> Json:
    """The body of an answer that is not a result, as a client of `dialect` reads it."""
    return anthropic_payload(error, request_id) if dialect == "messages" else error.payload()
