"""When a request must be put into another dialect, and how: the gateway's side of `protocol.translate`.

    client \\ upstream     openai                                        anthropic
    chat                  as it is                                      messages
    messages              chat                                          as it is
    responses             as it is where /responses exists, else chat   messages

Everything else (completions, embeddings, ...) exists in one dialect only and is refused at the other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from headrace.gateway.stream import Usage, Wire
from headrace.protocol import json
from headrace.protocol.errors import ApiError
from headrace.protocol.translate.events import Dialect
from headrace.protocol.translate.exchange import Exchange, Outgoing
from headrace.protocol.translate.translator import StreamTranslator, translate_answer, translate_request

_CLIENT: dict[str, Dialect] = {"chat": "chat", "messages": "messages", "responses": "responses"}
_PATHS: dict[Dialect, str] = {"chat": "/chat/completions", "messages": "/messages", "responses": "/responses"}
_WIRES: dict[Dialect, Wire] = {"chat": "openai", "messages": "messages", "responses": "responses"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """One request in the upstream's dialect, and what its answer needs on the way back."""

    body: bytes
    path: str
    wire: Wire
    dropped: tuple[str, ...]
    exchange: Exchange

    def stream(self) -> StreamTranslator:
        return StreamTranslator(self.exchange)

    def answer(self, body: bytes) -> tuple[bytes, Usage, bool]:
        """The client's body, the tokens, and whether those are an estimate. Raises ApiError for what is no answer."""
        translated = translate_answer(body, self.exchange)
        used = translated.usage
        usage = Usage(used.input_tokens, used.output_tokens, used.cached_tokens)
        return msgspec.json.encode(translated.body), usage, used.estimated


def dialect_needed(endpoint: str, upstream_dialect: str, *, native_responses: bool) -> Dialect | None:
    """The dialect to translate into, None where the request can go as it is. Raises ApiError where neither helps."""
    client = _CLIENT.get(endpoint)
    if upstream_dialect == "anthropic":
        if client is None:
            message = f"The upstream for this model speaks Anthropic's Messages API, which has no `{endpoint}`."
            raise ApiError(400, message, code="unsupported_endpoint")
        return None if client == "messages" else "messages"
    if client == "messages" or (client == "responses" and not native_responses):
        return "chat"
    return None


def translate(
    body: bytes,
    endpoint: str,
    dialect: Dialect,
    *,
    model: str,
    upstream_model: str,
    request_id: str,
    prompt_tokens: int,
    wants_usage_of_upstream: bool,
    continues: bool,
) -> Translation:
    """Raises ApiError (400) for what the upstream's dialect has no words for."""
    sent = translate_request(
        json.read_value(body, body),
        client=_CLIENT[endpoint],
        upstream=dialect,
        model=model,
        upstream_model=upstream_model,
        request_id=request_id,
        created_s=int(time.time()),
        prompt_tokens=prompt_tokens,
        continues=continues,
    )
    fields = sent.body
    if dialect == "chat" and wants_usage_of_upstream:
        fields = {**fields, "stream_options": {"include_usage": True}}
    return Translation(
        body=msgspec.json.encode(fields),
        path=_PATHS[dialect],
        wire=_WIRES[dialect],
        dropped=sent.dropped,
        exchange=sent.exchange,
    )


def encoded(outgoing: list[Outgoing]) -> bytes:
    return b"".join(event.encode() for event in outgoing)
