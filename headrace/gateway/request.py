"""A client's request as values: what routing looks at, and what is sent to an upstream for it.

`read` takes the few fields that matter from the outermost level of the body. `call_for` makes one upstream's request
of it: the model's name there, presets for absent fields, usage asked for in streams, another dialect where the
upstream speaks another. Where nothing has to change, the body is the very bytes that came in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.gateway import headers, stream
from headrace.gateway.balance import MAX_PROMPT_BYTES, Affinity, affinity_of
from headrace.gateway.body import Fields, form_field, with_form_field
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
from headrace.protocol.translate.wire import kind

PROMPT_FIELDS = frozenset("messages prompt input system instructions tools query documents texts".split())
AFFINITY_FIELDS = ("system", "instructions", "messages", "prompt", "input")
MAX_TOKENS_FIELDS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
NUM_ANSWERS_FIELDS = frozenset({"n", "best_of"})
READ_FIELDS = MAX_TOKENS_FIELDS | NUM_ANSWERS_FIELDS | {"model", "stream", "stream_options", "tools"}
MAX_ANSWERS = 10_000
_JSON = b"application/json"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request that a key may make. `fields` None: the body is a form."""

    endpoint: Endpoint
    path: str
    """Canonical, as it is joined to an upstream's base URL."""
    query: bytes
    body: bytes
    fields: Fields | None
    content_type: bytes
    facts: RequestFacts
    stream: bool = False
    wants_usage: bool = False
    """The client asked for the extra usage chunk of an OpenAI stream."""
    sent_headers: headers.RawHeaders
    request_id: bytes

    def affinity(self, plan: Plan | None) -> Affinity | None:
        """What it has in common with requests that one replica should answer."""
        fields = self.fields
        if fields is None:
            return None
        stays = plan is not None and plan.session_affinity
        session = next((value for name, value in self.sent_headers if name in headers.SESSION), None)
        for name in ("prompt_cache_key", "user") if stays else ("prompt_cache_key",):
            if session is None and name in fields:
                session = fields.text(name)
        prompt = b""
        for name in AFFINITY_FIELDS if session is None else ():
            if name in fields and len(prompt) < MAX_PROMPT_BYTES:
                prompt += fields.text(name)[: MAX_PROMPT_BYTES - len(prompt)]
        return affinity_of(session, prompt, self.facts.model or "", stays=stays)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt sends. `wire` is the dialect of the upstream's answer."""

    path: str
    body: bytes
    headers: Mapping[bytes, bytes]
    wire: stream.Wire
    translation: Translation | None = None


def read(exchange: Exchange, place: Place, body: bytes, record: KeyRecord) -> Request:
    """Raises ApiError (400) for a body that is no JSON object, or has a key twice."""
    content_type = exchange.headers.get(b"content-type", _JSON)
    if content_type != _JSON and content_type.lower().startswith(b"multipart/form-data"):
        span = form_field(body, content_type, "model")
        fields = None
        facts = RequestFacts(
            endpoint=place.endpoint.name,
            model=body[span[0] : span[1]].decode("utf-8", "replace") if span else None,
            key_name=record.name,
            key_tags=record.tags,
            headers=TextHeaders(exchange.headers),
            visible_models=record.models,
        )
        streamed, wants_usage = False, False
    else:
        fields = Fields(body)
        facts, wants_usage = _facts(exchange, place, fields, record)
        streamed = facts.stream and place.endpoint.kind == "generate"
    return Request(
        endpoint=place.endpoint,
        path=place.upstream_path,
        query=exchange.query,
        body=body,
        fields=fields,
        content_type=content_type,
        facts=facts,
        stream=streamed,
        wants_usage=wants_usage,
        sent_headers=exchange.raw_headers,
        request_id=exchange.request_id,
    )


def _facts(exchange: Exchange, place: Place, fields: Fields, record: KeyRecord) -> tuple[RequestFacts, bool]:
    """What routing looks at, and whether the client asked for the usage chunk."""
    model: str | None = None
    max_tokens: int | None = None
    streamed: bool | None = None
    wants_usage = False
    num_tools = prompt_tokens = 0
    num_answers = 1
    for name in fields.raws:
        if name in PROMPT_FIELDS:
            prompt_tokens += estimate_tokens(fields.text(name))
        if name not in READ_FIELDS:
            continue
        value = fields.value(name)
        if name == "model":
            if value is not None and not isinstance(value, str):
                raise errors.invalid_type("model", "a string", kind(value))
            model = value or None
        elif name == "stream":
            if value is not None and not isinstance(value, bool):
                raise errors.invalid_type("stream", "true or false", kind(value))
            streamed = value
        elif name == "stream_options":
            wants_usage = isinstance(value, dict) and value.get("include_usage") is True
        elif name == "tools":
            num_tools = len(value) if isinstance(value, list) else 0
        elif type(value) is not int:
            continue  # whoever answers refuses it
        elif name in NUM_ANSWERS_FIELDS:
            num_answers = max(num_answers, min(value, MAX_ANSWERS))
        elif value >= 0:  # some servers take -1 for no limit
            max_tokens = value if max_tokens is None else max(max_tokens, value)
    facts = RequestFacts(
        endpoint=place.endpoint.name,
        model=model,
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        stream=bool(streamed),
        num_tools=num_tools,
        num_answers=num_answers,
        key_name=record.name,
        key_tags=record.tags,
        headers=TextHeaders(exchange.headers),
        visible_models=record.models,
    )
    return facts, wants_usage


def call_for(
    request: Request, attempt: Attempt, model: Model, plan: Plan | None, snapshot: Snapshot, *, native_responses: bool
) -> Call:
    """`native_responses`: the upstream is believed to have /responses.

    Raises ApiError for what cannot be put into the upstream's dialect.
    """
    upstream = attempt.upstream
    content_type = request.content_type if request.fields is None else _JSON  # read as JSON, whatever it was called
    sent_headers = headers.forwarded(
        request.sent_headers, request.request_id, dialect=upstream.dialect, content_type=content_type
    )
    if request.fields is None:
        return Call(path=request.path, body=_form(request, attempt.model), headers=sent_headers, wire="openai")
    name = request.endpoint.name
    changes: dict[str, Any] = {}
    if model.presets or snapshot.presets or (plan is not None and plan.presets):
        room = None
        if attempt.context_window is not None:
            room = attempt.context_window - request.facts.prompt_tokens
        raws = request.fields.raws
        filled = apply_presets(
            raws,
            plan.presets if plan else {},
            model.presets,
            snapshot.presets,
            endpoint=name,
            extended=upstream.extended_sampling,
            one_of_temperature_and_top_p=upstream.dialect == "anthropic",
            room_tokens=room,
        )
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
            continues=upstream.extended_sampling,
        )
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
    if request.facts.model == model:
        return request.body
    return with_form_field(request.body, request.content_type, "model", model)
