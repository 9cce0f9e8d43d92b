"""What a client is told when an upstream did not answer properly, and what the attempt loop does about it.

Every failure of an upstream becomes one `UpstreamFailure`: the error for the client, whether another upstream is worth
asking, whether this one may be asked again, and whether its breaker counts it. Texts of upstreams are shortened and
their key is never in them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.protocol.errors import ApiError

if TYPE_CHECKING:
    from headrace.gateway.snapshot import Upstream

MAX_TEXT_CHARS = 600
MAX_RETRY_AFTER_S = 7 * 24 * 3600.0

_OVERFLOW = re.compile(
    r"context.{0,12}(length|window|size|limit)|maximum (context|prompt|input|sequence)|prompt is too long"
    r"|too many tokens|input (is )?too long|reduce the length|exceeds? the (available )?context|max_model_len"
    r"|longer than the (maximum )?model|tokens.{0,40}must be <=|exceeds the maximum number of tokens",
    re.IGNORECASE,
)
_UNKNOWN_MODEL = re.compile(
    r"model.{0,120}(not[ _](found|exist|available|supported)|does ?n.t exist|does not exist|unknown|invalid model)"
    r"|(no such|unknown|invalid) model|model_not_found",
    re.IGNORECASE | re.DOTALL,
)
_ENDPOINT = re.compile(r"/v\d|\b(endpoint|route|url)\b|unknown_endpoint", re.IGNORECASE)
_THING = re.compile(
    r"\b(file|response|batch|item|conversation|container)s?\b.{0,200}(not found|not exist|n.t exist)"
    r"|\bno (such )?(file|response|batch|item|conversation|container)\b",
    re.IGNORECASE | re.DOTALL,
)
_TITLE = re.compile(rb"<title[^>]{0,200}>([^<]{1,200})", re.IGNORECASE)
MAX_LOOKED_AT_CHARS = 4000
"""Of an error's message, when what it is about is worked out."""


class UpstreamFailure(Exception):
    """One attempt came to nothing before any content reached the client."""

    def __init__(
        self,
        error: ApiError,
        *,
        falls_back: bool = True,
        repeats: bool = False,
        elsewhere: bool = False,
        counts: bool = True,
        retry_after_s: float | None = None,
    ) -> None:
        """`repeats`: the same upstream may well answer if asked again. `elsewhere`: another replica may have what this
        one has not. `counts`: for its breaker."""
        super().__init__(error.message)
        self.error = error
        self.falls_back = falls_back
        self.repeats = repeats
        self.elsewhere = elsewhere
        self.counts = counts
        self.retry_after_s = retry_after_s


def _upstream_error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> ApiError:
    kind = "server_error" if status == 503 else "upstream_error"
    return ApiError(status, message, type=kind, code=code, headers=headers)


def unreachable(upstream: Upstream, url: str, detail: str) -> UpstreamFailure:
    message = (
        f"The upstream {upstream.name} cannot be reached at {_origin(url)}: {detail}. "
        "Is it running, and is its base_url right?"
    )
    return UpstreamFailure(_upstream_error(502, "upstream_unreachable", message), repeats=True)


def connection_lost(upstream: Upstream) -> UpstreamFailure:
    message = f"The upstream {upstream.name} closed the connection without an answer."
    return UpstreamFailure(_upstream_error(502, "upstream_unreachable", message), repeats=True)


def timed_out(upstream: Upstream, limit: str, seconds: float, *, is_whole: bool = False) -> UpstreamFailure:
    """`limit` is connect, first_token, idle or total: the name of the setting without its unit. `is_whole`: no stream
    was asked for."""
    what = {
        "connect": "took no connection",
        "first_token": "sent nothing of an answer",
        "idle": "fell silent in the middle of its answer",
        "total": "was not done with its answer",
    }[limit]
    message = (
        f"The upstream {upstream.name} {what} within {seconds:g} s. "
        f"This limit is `timeouts.{limit}` of the upstream {upstream.name}."
    )
    if is_whole and limit == "total":
        message += " Ask for a long answer with `stream` true: then its words come as they are written."
    return UpstreamFailure(_upstream_error(504, f"upstream_timeout_{limit}", message))


def truncated(upstream: Upstream, detail: str = "") -> UpstreamFailure:
    message = f"The upstream {upstream.name} ended its answer in the middle{detail}; what was received is incomplete."
    return UpstreamFailure(_upstream_error(502, "upstream_stream_truncated", message), repeats=True)


def invalid_response(upstream: Upstream, detail: str) -> UpstreamFailure:
    message = f"The upstream {upstream.name} sent no valid answer: {detail}."
    return UpstreamFailure(_upstream_error(502, "upstream_invalid_response", message))


def blocked_address(upstream: Upstream, detail: str) -> UpstreamFailure:
    message = f"The upstream {upstream.name} is not called: {detail}."
    return UpstreamFailure(_upstream_error(502, "upstream_address_refused", message), counts=False)


def cannot_go_on(upstream: Upstream) -> ApiError:
    """Only for the log: the client is told why the answer that it has begun to read broke."""
    message = f"The upstream {upstream.name} cannot be asked to go on with this answer."
    return _upstream_error(502, "upstream_cannot_continue", message)


def none_healthy(model: str) -> ApiError:
    message = (
        f"No upstream for the model `{model}` is healthy at the moment: each failed several times in a row and is "
        "left alone for some seconds. Try again soon; /health names them."
    )
    return _upstream_error(503, "no_healthy_upstream", message, {"retry-after": "5"})


def from_status(upstream: Upstream, status: int, headers: Mapping[bytes, bytes], body: bytes) -> UpstreamFailure:
    """The failure that an answer with a status other than 200 is."""
    name = upstream.name
    fields = error_fields(body)
    text = _text(upstream, fields, body)
    retry_after_s = _retry_after(headers)
    if status in (401, 402, 403):
        refusal = {401: "refused the key", 402: "wants payment", 403: "denied access"}[status]
        message = (
            f"The upstream {name} {refusal} that this gateway uses for it (status {status}). Your own key is fine: "
            f"whoever runs the gateway must check `api_key` of the upstream {name}."
        )
        return UpstreamFailure(_upstream_error(502, "upstream_auth_failed", message))
    if status == 429:
        code = str(fields.get("code") or fields.get("type") or "")
        exhausted = "insufficient_quota" in code or "billing" in code
        wait = {} if retry_after_s is None else {"retry-after": str(max(1, round(retry_after_s)))}
        error = ApiError(
            429,
            f"The upstream {name} is over its limit: {text}",
            type="rate_limit_error",
            code="upstream_rate_limited",
            headers=wait,
        )
        return UpstreamFailure(error, repeats=not exhausted, counts=False, retry_after_s=retry_after_s)
    if 300 <= status < 400:
        return invalid_response(upstream, f"it redirects (status {status}), so its base_url is not the final address")
    if status in (400, 413, 422) and _OVERFLOW.search(text):
        error = ApiError(400, text, code="context_length_exceeded", param=_param(fields))
        return UpstreamFailure(error, counts=False)
    if status in (400, 404, 422) and _names_model(fields):
        message = f"The upstream {name} does not have this model: {text}"
        return UpstreamFailure(ApiError(404, message, code="model_not_found", param="model"), counts=False)
    if status == 501 and fields:
        code = str(fields.get("code") or "not_implemented")
        error = ApiError(501, text, code=code, param=_param(fields), headers={"x-should-retry": "false"})
        return UpstreamFailure(error, counts=False)
    if status == 404 and names_thing(fields):
        code = str(fields.get("code") or "not_found")
        error = ApiError(404, text, code=code, param=_param(fields))
        return UpstreamFailure(error, falls_back=False, elsewhere=True, counts=False)
    if status in (404, 405, 501):
        said = f": {text.rstrip('.')}" if fields else ""
        detail = f"it has no such endpoint (status {status}{said}); check its base_url, or the model cannot do this"
        failure = invalid_response(upstream, detail)
        failure.counts = False
        return failure
    if status in (408, 504):
        message = f"The upstream {name} timed out by itself (status {status}): {text}"
        return UpstreamFailure(_upstream_error(504, "upstream_timeout_total", message), repeats=True)
    if status >= 500:
        if not fields and not _looks_like_json(body):
            failure = invalid_response(upstream, f"status {status} with {_described(body, headers)}")
            failure.repeats = True
            return failure
        if status in (503, 529):
            wait = {"retry-after": str(max(1, round(2 if retry_after_s is None else retry_after_s)))}
            error = _upstream_error(503, "upstream_overloaded", f"The upstream {name} is overloaded: {text}", wait)
            return UpstreamFailure(error, repeats=True, retry_after_s=retry_after_s)
        message = f"The upstream {name} failed (status {status}): {text}"
        return UpstreamFailure(_upstream_error(502, "upstream_error", message), repeats=True)
    if 400 <= status < 500:
        if not fields:
            return invalid_response(upstream, f"status {status} with {_described(body, headers)}")
        error = ApiError(
            status,
            text,
            type=str(fields.get("type") or "invalid_request_error"),
            code=None if fields.get("code") is None else str(fields["code"]),
            param=_param(fields),
        )
        return UpstreamFailure(error, falls_back=False, counts=False)
    return invalid_response(upstream, f"status {status} is not an answer to this request")


def from_error_body(upstream: Upstream, fields: Mapping[str, Any]) -> UpstreamFailure:
    """The failure that an error inside an answer with status 200 (or inside a stream) is."""
    raw = fields.get("code", fields.get("status"))
    code = raw if isinstance(raw, int) else int(raw) if isinstance(raw, str) and raw.isdigit() else None
    if code is None:
        kind = str(fields.get("type") or "")
        code = {
            "invalid_request_error": 400,
            "BadRequestError": 400,
            "NotFoundError": 404,
            "not_found_error": 404,
            "rate_limit_error": 429,
            "overloaded_error": 529,
            "authentication_error": 401,
            "permission_error": 403,
        }.get(kind, 500)
    if not 400 <= code < 600:
        code = 500
    return from_status(upstream, code, {}, msgspec.json.encode({"error": dict(fields)}))


def error_fields(body: bytes) -> dict[str, Any]:
    """The error object of a body in any of the usual shapes, {} where it has none.

    {"error": {...}}; {"error": "text"}; vLLM's {"object": "error", "message": ...}; {"detail": ...}; {"message": ...};
    Anthropic's {"type": "error", "error": {...}}; Google's [{"error": {...}}].
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    if isinstance(value, list) and value:
        value = value[0]
    return error_in(value) or (_loose(value) if isinstance(value, dict) else {})


def error_in(value: Any) -> dict[str, Any]:
    """The error object in a decoded answer or event, {} where it is none: what a result may hold is no error."""
    if not isinstance(value, dict):
        return {}
    error = value.get("error")
    if isinstance(error, dict) and error:
        return error
    if isinstance(error, str) and error:
        return {**{k: v for k, v in value.items() if k in ("code", "type", "param")}, "message": error}
    if value.get("object") == "error":
        return {k: v for k, v in value.items() if k != "object"}
    return {}


def _loose(value: dict[str, Any]) -> dict[str, Any]:
    for name in ("message", "detail", "error_message", "msg"):
        found = value.get(name)
        if found:
            text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
            return {"message": text, **{k: v for k, v in value.items() if k in ("code", "type", "param")}}
    return {}


def lacks_endpoint(status: int, body: bytes) -> bool:
    """Whether an answer says that there is no such endpoint, rather than no such model, file or response."""
    if status not in (404, 405, 501):
        return False
    fields = error_fields(body)
    return not _names_model(fields) and not (status == 404 and names_thing(fields))


def names_thing(fields: Mapping[str, Any]) -> bool:
    """Whether a 404 is about something that the request names by its id: a file, a batch, a response."""
    code, text = str(fields.get("code") or ""), str(fields.get("message") or "")[:MAX_LOOKED_AT_CHARS]
    if _ENDPOINT.search(f"{code} {text}"):
        return False
    return bool(_param(fields)) or code.endswith("_not_found") or bool(_THING.search(text))


def _names_model(fields: Mapping[str, Any]) -> bool:
    """Anthropic names the model in the message and says in the type that it is not there."""
    told = (str(fields.get(name) or "")[:MAX_LOOKED_AT_CHARS] for name in ("message", "code", "type"))
    return bool(_UNKNOWN_MODEL.search(" ".join(told)))


def described(body: bytes, headers: Mapping[bytes, bytes]) -> str:
    """What a body that is no JSON is, in words, for a message."""
    return _described(body, headers)


def _described(body: bytes, headers: Mapping[bytes, bytes]) -> str:
    if not body.strip():
        return "an empty body"
    title = _TITLE.search(body)
    if title is not None or b"<html" in body[:2000].lower() or b"html" in headers.get(b"content-type", b""):
        shown = f" titled {title[1].decode('utf-8', 'replace').strip()!r}" if title else ""
        return f"an HTML page{shown}"
    return f"a body of {len(body)} bytes that is not JSON of the expected form"


def _looks_like_json(body: bytes) -> bool:
    return body.lstrip()[:1] in (b"{", b"[")


def _text(upstream: Upstream, fields: Mapping[str, Any], body: bytes) -> str:
    text = fields.get("message")
    if not isinstance(text, str) or not text.strip():
        text = "no reason was given"
    if upstream.api_key and len(upstream.api_key) > 5:
        text = text.replace(upstream.api_key, "***")
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


def _param(fields: Mapping[str, Any]) -> str | None:
    param = fields.get("param")
    return param if isinstance(param, str) else None


def _retry_after(headers: Mapping[bytes, bytes]) -> float | None:
    """Seconds, however they are told; None where nothing of use is."""
    for name, unit in ((b"retry-after-ms", 0.001), (b"retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) * unit
        except ValueError:
            seconds = _until(text.decode("latin-1"))
        if math.isfinite(seconds):
            return min(max(0.0, seconds), MAX_RETRY_AFTER_S)
    return None


def _until(date: str) -> float:
    """Seconds until a date as HTTP writes it; NaN where it is none."""
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except ValueError:
        return math.nan


def _origin(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"
