"""A client's request as values: what routing looks at, and what is sent to an upstream for it.

`read` takes the few fields that matter from the outermost level of the body. `call_for` makes one upstream's request
of it: the model's name there, presets for absent fields, usage asked for in streams, another dialect where the
upstream speaks another. Where nothing has to change, the body is the very bytes that came in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.gateway import headers, stream
from headrace.gateway.balance import affinity_of
from headrace.gateway.body import Fields, form_field
from headrace.gateway.estimate import estimate_tokens
from headrace.gateway.exchange import Exchange
from headrace.gateway.headers import TextHeaders
from headrace.gateway.keys import KeyRecord
from headrace.gateway.paths import Endpoint, Place
from headrace.gateway.presets import apply_presets
from headrace.gateway.route import Attempt
from headrace.gateway.rules import RequestFacts
from headrace.gateway.snapshot import Model, Plan, Snapshot
from headrace.gateway.translation import Translation, dialect_needed, translate
from headrace.protocol import errors

PROMPT_FIELDS = frozenset("messages prompt input system instructions tools query documents texts".split())
AFFINITY_FIELDS = ("system", "instructions", "messages", "prompt", "input")
MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that a key may make. `fields` None: the body is a form."""

    endpoint: Endpoint
    path: str
    """Canonical, as it is joined to an upstream's base URL."""
    query: bytes
    body: bytes
    fields: Fields | None
    content_type: bytes
    facts: RequestFacts
    stream: bool
    wants_usage: bool
    """The client asked for the extra usage chunk of an OpenAI stream."""
    affinity: bytes | None
    sent_headers: headers.RawHeaders
    request_id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one attempt sends. `wire` is the dialect of the upstream's answer."""

    path: str
    body: bytes
    headers: Mapping[bytes, bytes]
    wire: stream.Wire
    translation: Translation | None = None


def read(exchange: Exchange, place: Place, body: bytes, record: KeyRecord) -> Request:
    """Raises ApiError (400) for a body that is no JSON object, or has a key twice."""
    endpoint = place.endpoint
    content_type = exchange.headers.get(b"content-type", b"application/json")
    sent: dict[str, Any] = {
        "endpoint": endpoint,
        "path": place.upstream_path,
        "query": exchange.query,
        "body": body,
        "content_type": content_type,
        "sent_headers": exchange.raw_headers,
        "request_id": exchange.request_id,
    }
    who: dict[str, Any] = {
        "endpoint": endpoint.name,
        "key_name": record.name,
        "key_tags": record.tags,
        "headers": TextHeaders(exchange.headers),
        "visible_models": record.models,
    }
    if content_type.lower().startswith(b"multipart/form-data"):
        span = form_field(body, content_type, "model")
        model = body[span[0] : span[1]].decode("utf-8", "replace") if span else None
        facts = RequestFacts(model=model, **who)
        return Request(fields=None, facts=facts, stream=False, wants_usage=False, affinity=None, **sent)
    fields = Fields(body)
    raws = fields.raws
    model = fields.value("model")
    if model is not None and not isinstance(model, str):
        raise errors.invalid_type("model", "a string", type(model).__name__)
    streamed = fields.value("stream")
    if streamed is not None and not isinstance(streamed, bool):
        raise errors.invalid_type("stream", "true or false", type(streamed).__name__)
    options = fields.value("stream_options")
    tools = fields.value("tools")
    facts = RequestFacts(
        model=model or None,
        max_tokens=_max_tokens(fields),
        prompt_tokens=sum([estimate_tokens(fields.text(name)) for name in raws if name in PROMPT_FIELDS]),
        stream=bool(streamed),
        num_tools=len(tools) if isinstance(tools, list) else 0,
        **who,
    )
    return Request(
        fields=fields,
        facts=facts,
        stream=bool(streamed) and endpoint.kind == "generate",
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        affinity=_affinity(exchange, fields),
        **sent,
    )


def _max_tokens(fields: Fields) -> int | None:
    for name in MAX_TOKENS_FIELDS:
        if name in fields:
            value = fields.value(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _affinity(exchange: Exchange, fields: Fields) -> bytes:
    session = next((exchange.headers[name] for name in headers.SESSION if name in exchange.headers), None)
    if session is None and "prompt_cache_key" in fields:
        session = fields.text("prompt_cache_key")
    prompt = b""
    for name in AFFINITY_FIELDS:
        if name in fields:
            prompt += fields.text(name)[:2048]
            if len(prompt) >= 2048:
                break
    return affinity_of(session, prompt)


def call_for(
    request: Request, attempt: Attempt, model: Model, plan: Plan | None, snapshot: Snapshot, *, native_responses: bool
) -> Call:
    """`native_responses`: the upstream is believed to have /responses.

    Raises ApiError for what cannot be put into the upstream's dialect.
    """
    upstream = attempt.upstream
    sent_headers = headers.forwarded(
        request.sent_headers, request.request_id, dialect=upstream.dialect, content_type=request.content_type
    )
    if request.fields is None:
        return Call(path=request.path, body=_form(request, attempt.model), headers=sent_headers, wire="openai")
    name = request.endpoint.name
    layers = [plan.presets if plan else {}, model.presets, snapshot.presets]
    room = None
    if attempt.context_window is not None:
        room = attempt.context_window - request.facts.prompt_tokens
    raws = request.fields.raws
    filled = apply_presets(
        raws,
        *layers,
        endpoint=name,
        extended=upstream.extended_sampling,
        one_of_temperature_and_top_p=upstream.dialect == "anthropic",
        room_tokens=room,
    )
    changes: dict[str, Any] = {}
    if filled is not raws:
        changes = {field: raw for field, raw in filled.items() if raws.get(field) is not raw}
    if request.facts.model != attempt.model:
        changes["model"] = attempt.model
    dialect = dialect_needed(name, upstream.dialect, native_responses=native_responses)
    if dialect is not None:
        translation = translate(
            request.fields.changed(changes),
            name,
            dialect,
            model=request.facts.model or model.name,
            upstream_model=attempt.model,
            request_id=request.request_id.decode("latin-1"),
            prompt_tokens=request.facts.prompt_tokens,
            wants_usage_of_upstream=request.stream,
        )
        sent_headers[b"content-type"] = b"application/json"
        return Call(
            path=translation.path,
            body=translation.body,
            headers=sent_headers,
            wire=translation.wire,
            translation=translation,
        )
    if request.stream and name in ("chat", "completions") and not request.wants_usage:
        options = request.fields.value("stream_options") if "stream_options" in request.fields else None
        changes["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    wire: stream.Wire = "messages" if name == "messages" else "responses" if name == "responses" else "openai"
    return Call(path=request.path, body=request.fields.changed(changes), headers=sent_headers, wire=wire)


def _form(request: Request, model: str) -> bytes:
    """The form with the model's name at the upstream."""
    span = form_field(request.body, request.content_type, "model")
    if span is None or request.facts.model == model:
        return request.body
    return request.body[: span[0]] + model.encode() + request.body[span[1] :]
