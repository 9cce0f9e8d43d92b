"""The error table: every answer that is not a result is made here.

One exception, `ApiError`, carries what the client sees: status, type, code (a string), message, the field at
fault. The body is `{"error": {message, type, param, code}, "message": ...}`; the message is repeated at top
level for people who print the body and read `message`. Statuses and codes are the same in engine and gateway.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping

import msgspec

_encode = msgspec.json.Encoder().encode

MAX_QUOTED_CHARS = 80


class ApiError(Exception):
    """A request that gets no result. Safe to show: the message never holds keys, paths of ours or stack traces."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def payload(self) -> dict[str, object]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error, "message": self.message}

    def body(self) -> bytes:
        return _encode(self.payload())


def quoted(value: object) -> str:
    """A value as JSON for an error message, shortened: the reader must recognise it, not read all of it."""
    text = str(value) if isinstance(value, float) and not math.isfinite(value) else _encode(value).decode()
    return text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 3] + "..."


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` was probably meant to be: same but for case, hyphens and dots, or close."""
    candidates = list(names)
    folded = {_fold(candidate): candidate for candidate in reversed(candidates)}
    if _fold(name) in folded:
        return folded[_fold(name)]
    close = difflib.get_close_matches(_fold(name), list(folded), n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def _fold(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


# 400: the request itself


def invalid_http() -> ApiError:
    return ApiError(
        400, "What was sent is not an HTTP/1.1 request. Is https:// used where http:// is meant?", code="invalid_http"
    )


def broken_body() -> ApiError:
    message = "The request's body is not sent as HTTP/1.1 wants: a chunk's length, or what stands behind it, is wrong."
    return ApiError(400, message, code="invalid_http")


def invalid_json(detail: str) -> ApiError:
    return ApiError(400, f"The request body is not valid JSON: {detail}", code="invalid_json")


def not_an_object(found: str) -> ApiError:
    return ApiError(400, f"The request body must be a JSON object, but it is {found}.", code="invalid_json")


def duplicate_key(name: str) -> ApiError:
    message = f"The request body has the key {quoted(name)} twice; send it once."
    return ApiError(400, message, code="duplicate_key", param=name)


def invalid_value(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


def invalid_type(param: str, expected: str, found: str) -> ApiError:
    return ApiError(400, f"`{param}` must be {expected}, but it is {found}.", code="invalid_type", param=param)


def out_of_range(param: str, value: object, allowed: str) -> ApiError:
    return invalid_value(param, f"`{param}` must be {allowed}, but it is {quoted(value)}.")


def too_many_sequences(param: str, prompts: int, n: int, *, running: int, waiting: int) -> ApiError:
    """More answers than the server has places for even when it is idle."""
    made_of = f" ({prompts} prompts, {n} each)" if prompts > 1 and n > 1 else ""
    message = (
        f"The request asks for {prompts * n} answers{made_of}, and this server has places for {running + waiting}: "
        f"{running} run at once (--max-num-seqs) and {waiting} may wait (--max-num-queued-reqs). Send several requests "
        "one after the other, or a file of them to /v1/batches or to `headrace run-batch`."
    )
    return ApiError(400, message, code="too_many_sequences", param=param)


def too_many_queued_tokens(num_tokens: int, limit: int) -> ApiError:
    """Of the prompts of one request, even when the server is idle."""
    message = (
        f"The prompts that would wait for the others of this request have {num_tokens} tokens, and the queue holds "
        f"{limit} (--max-num-queued-tokens). Send several requests one after the other, or a file of them to "
        "/v1/batches or to `headrace run-batch`."
    )
    return ApiError(400, message, code="too_many_sequences", param="prompt")


def missing_field(param: str, advice: str) -> ApiError:
    return ApiError(400, f"`{param}` is missing: {advice}", code="missing_field", param=param)


def unsupported_field(param: str, advice: str = "") -> ApiError:
    message = f"`{param}` is not supported yet by this server." + (f" {advice}" if advice else "")
    return ApiError(400, message, code="unsupported_parameter", param=param)


def context_length_exceeded(
    *, limit: int, prompt_tokens: int, max_tokens: int | None, where: str, limit_param: str = "max_tokens"
) -> ApiError:
    """`max_tokens` None: the prompt alone leaves no room for one token. `where` is "messages" or "prompt"."""
    start = f"This model's maximum context length is {limit} tokens. However, "
    if max_tokens is None or prompt_tokens >= limit:
        message = (
            f"{start}the {where} alone {'have' if where == 'messages' else 'has'} {prompt_tokens} tokens, and at least "
            f"one must be left for the answer. Shorten the {where} by {prompt_tokens - limit + 1} tokens or more."
        )
        return ApiError(400, message, code="context_length_exceeded", param=where)
    message = (
        f"{start}you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {where}, {max_tokens} in "
        f"the completion). Set `{limit_param}` to {limit - prompt_tokens} or less, or shorten the {where}."
    )
    return ApiError(400, message, code="context_length_exceeded", param=limit_param)


def text_too_long(param: str, num_tokens: int, limit: int) -> ApiError:
    """For models that give vectors or scores, where the whole context is the text's."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, `{param}` has {num_tokens}. Shorten it by "
        f"{num_tokens - limit} tokens or more, or send `truncate_prompt_tokens` (-1 keeps what fits)."
    )
    return ApiError(400, message, code="context_length_exceeded", param=param)


def wrong_for_model(message: str) -> ApiError:
    """The endpoint is there, and this model is served for something else."""
    return ApiError(400, message, code="unsupported_by_model", param="model")


def no_chat_template() -> ApiError:
    message = (
        "This model has no chat template, so messages cannot be turned into a prompt. Start the server with "
        "--chat-template FILE, or send a finished prompt to /v1/completions."
    )
    return ApiError(400, message, code="no_chat_template", param="messages")


def chat_template_failed(detail: str) -> ApiError:
    message = f"These messages cannot be turned into a prompt: {detail}"
    return ApiError(400, message, code="invalid_messages", param="messages")


def not_enabled(message: str) -> ApiError:
    return ApiError(400, message, code="not_enabled")


def refused(code: str, message: str, param: str | None = None) -> ApiError:
    """What the engine answers to a request that can never run, finds the queue full (429), or breaks it (500)."""
    if code == "engine_error":
        return engine_error(message)
    return queue_full(message) if code == "queue_full" else ApiError(400, message, code=code, param=param)


def failed(code: str, message: str | None) -> ApiError:
    """What the engine says of a request that it could not go on with: 400 where only the request is to blame."""
    if code == "grammar_dead_end":
        return ApiError(400, message or "The grammar allows nothing more.", code=code)
    return engine_error(message or "The engine failed on this request.")


# 401, 403: who asks


def missing_api_key() -> ApiError:
    return _unauthorized(
        "missing_api_key",
        "No API key was sent, and this server was started with --api-key. "
        "Send the header `Authorization: Bearer <your key>`.",
    )


def malformed_authorization(detail: str) -> ApiError:
    return _unauthorized(
        "malformed_authorization",
        f"The Authorization header is not understood: {detail} It must read `Authorization: Bearer <your key>`.",
    )


def invalid_api_key() -> ApiError:
    return _unauthorized(
        "invalid_api_key",
        "The API key is not one of this server's keys. Compare it with the value of --api-key; look for a missing or "
        "additional character.",
    )


def _unauthorized(code: str, message: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})


def origin_not_allowed(origin: str, advice: str = "Start it with --allowed-origins.") -> ApiError:
    message = f"The origin {quoted(origin)} is not allowed by this server. {advice}"
    return ApiError(403, message, type="permission_error", code="origin_not_allowed")


def admin_needs_key(path: str) -> ApiError:
    message = (
        f"{path} is for whoever runs this server, which listens beyond this machine and has no --api-key to tell who "
        "that is. Start it with --api-key, or with --host 127.0.0.1."
    )
    return ApiError(403, message, type="permission_error", code="admin_needs_key")


# 404, 405, 501: where it goes


def model_not_found(name: str, served: Iterable[str]) -> ApiError:
    names = list(served)
    guess = nearest(name, names)
    hint = f" Did you mean `{guess}`?" if guess else ""
    message = f"The model `{name[:MAX_QUOTED_CHARS]}` does not exist.{hint} This server serves: {', '.join(names)}."
    return ApiError(404, message, code="model_not_found", param="model")


def response_not_found(response_id: str, param: str = "response_id") -> ApiError:
    """`param`: where the id stood, in the path or in the field `previous_response_id`."""
    message = (
        f"There is no response {quoted(response_id)} here: it was not stored, was deleted, or has made room for newer "
        "ones."
    )
    if param == "previous_response_id":
        message += " Send the whole history in `input` instead."
    return ApiError(404, message, code="response_not_found", param=param)


def unknown_endpoint(method: str, path: str, known: Iterable[str], *, canonical: str | None = None) -> ApiError:
    """`canonical` is the path without what clients put before it, where that is known."""
    guess = nearest(canonical or path, known)
    hint = f" Did you mean {guess}?" if guess else " /openapi.json lists all of them."
    return ApiError(
        404, f"There is no {method} {path[:MAX_QUOTED_CHARS]} on this server.{hint}", code="unknown_endpoint"
    )


def method_not_allowed(method: str, path: str, allowed: Iterable[str]) -> ApiError:
    names = ", ".join(sorted(allowed))
    message = f"{path} does not take {method}; use {names}."
    return ApiError(405, message, code="method_not_allowed", headers={"allow": names})


def not_implemented(path: str, feature: str) -> ApiError:
    message = f"{path} is not available: {feature} is not supported yet by this server."
    return ApiError(501, message, code="not_implemented", headers={"x-should-retry": "false"})


# 408, 413, 414, 415, 431: the request's way here


def request_timeout(seconds: float) -> ApiError:
    message = f"The request body did not arrive: nothing was received for {seconds:g} s."
    return ApiError(408, message, code="request_timeout", headers={"connection": "close"})


def request_too_large(limit_bytes: int) -> ApiError:
    message = f"The request body is larger than this server's limit of {limit_bytes} bytes."
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})


def url_too_long(limit_bytes: int) -> ApiError:
    message = f"The request's address is longer than this server's limit of {limit_bytes} bytes. Send data as the body."
    return ApiError(414, message, code="url_too_long")


def unsupported_encoding(encoding: str) -> ApiError:
    message = (
        f"The body comes with `Content-Encoding: {encoding[:MAX_QUOTED_CHARS]}`, and this server reads bodies only as "
        "they are (identity). Send it uncompressed."
    )
    headers = {"accept-encoding": "identity"}
    return ApiError(415, message, code="unsupported_encoding", headers=headers)


def head_too_large(limit_bytes: int) -> ApiError:
    message = f"The request's headers are larger than this server's limit of {limit_bytes} bytes."
    return ApiError(431, message, code="headers_too_large")


# 409, 429, 500, 503: the server's own state


def conflict(message: str) -> ApiError:
    return ApiError(409, message, code="conflict")


def queue_full(message: str, retry_after_s: int = 1) -> ApiError:
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=headers)


def internal_error(error_id: str) -> ApiError:
    message = f"The server failed while answering this request. Its log has the details under the id {error_id}."
    return ApiError(500, message, type="server_error", code="internal_error")


def engine_error(message: str) -> ApiError:
    return ApiError(500, message, type="server_error", code="engine_error")


def request_kills_engine(deaths: int) -> ApiError:
    message = (
        f"The engine process died {deaths} times while it worked on this request, so it is not tried again. Other "
        "requests go on; the server's log has more."
    )
    headers = {"x-should-retry": "false"}
    return ApiError(500, message, type="server_error", code="request_kills_engine", headers=headers)


def gateway_draining() -> ApiError:
    return unavailable("draining", "This gateway is shutting down. Try again in a few seconds.")


def unavailable(code: str, message: str, retry_after_s: int = 2) -> ApiError:
    """`code`: engine_loading, engine_restarting, engine_failed or draining."""
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(503, message, type="server_error", code=code, headers=headers)
