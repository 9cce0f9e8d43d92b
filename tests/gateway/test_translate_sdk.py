"""What the translators write, read by the clients that people use: the SDKs' own models and stream helpers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from hypothesis import given, settings
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from headrace.protocol.errors import ApiError
from headrace.protocol.translate.events import Answer, Dialect
from headrace.protocol.translate.failures import error_payload
from headrace.protocol.translate.listings import (
    ModelCard,
    anthropic_models,
    openai_models,
    token_count,
)
from headrace.protocol.translate.translator import (
    _WRITE_WHOLE,
    StreamTranslator,
    translate_answer,
    translate_request,
)
from headrace.protocol.translate.wire import Json
from tests.gateway.answers import THOUGHT_AND_CALLS, answers, data_lines, exchange, upstream_bytes
from tests.gateway.dialect_requests import REQUESTS

EVENTS: dict[Dialect, TypeAdapter[Any]] = {
    "chat": TypeAdapter(ChatCompletionChunk),
    "messages": TypeAdapter(RawMessageStreamEvent),
    "responses": TypeAdapter(ResponseStreamEvent),
}
WHOLE: dict[Dialect, TypeAdapter[Any]] = {
    "chat": TypeAdapter(ChatCompletion),
    "messages": TypeAdapter(Message),
    "responses": TypeAdapter(Response),
}
BODIES: dict[Dialect, TypeAdapter[Any]] = {
    "chat": TypeAdapter(CompletionCreateParamsNonStreaming),
    "messages": TypeAdapter(MessageCreateParamsNonStreaming),
    "responses": TypeAdapter(ResponseCreateParamsNonStreaming),
}
OTHER: dict[Dialect, Dialect] = {"chat": "messages", "messages": "chat", "responses": "chat"}


def client_bytes(answer: Answer, client: Dialect, fail: ApiError | None = None) -> bytes:
    """What a client of this dialect receives while an upstream of another one answers."""
    upstream = OTHER[client]
    stream = StreamTranslator(exchange(client, upstream))
    data = upstream_bytes(answer, upstream)
    sent = stream.feed(data if fail is None else data[: len(data) // 2])
    sent += stream.finish() if fail is None else stream.fail(fail)
    return b"".join(outgoing.encode() for outgoing in sent)


def whole_body(answer: Answer, client: Dialect) -> Json:
    upstream = OTHER[client]
    body = json.dumps(_WRITE_WHOLE[upstream](answer, exchange(upstream, upstream))).encode()
    return translate_answer(body, exchange(client, upstream)).body


def transport(body: bytes, status: int = 200) -> httpx2.MockTransport:
    """A server that answers everything with this body, a stream in pieces of seven bytes."""
    kind = "application/json" if body[:1] == b"{" else "text/event-stream"

    def answer(request: httpx2.Request) -> httpx2.Response:
        pieces = iter([body[at : at + 7] for at in range(0, len(body), 7)])
        return httpx2.Response(status, headers={"content-type": kind}, content=pieces)

    return httpx2.MockTransport(answer)


def openai_client(body: bytes, status: int = 200) -> openai.OpenAI:
    http = httpx2.Client(transport=transport(body, status))
    return openai.OpenAI(api_key="k", base_url="http://test/v1", http_client=http, max_retries=0)


def anthropic_client(body: bytes, status: int = 200) -> anthropic.Anthropic:
    http = httpx2.Client(transport=transport(body, status))
    return anthropic.Anthropic(api_key="k", base_url="http://test", http_client=http, max_retries=0)


MESSAGES: list[Any] = [{"role": "user", "content": "Weather?"}]


def test_the_anthropic_stream_helper_ends_with_the_whole_answer():
    client = anthropic_client(client_bytes(THOUGHT_AND_CALLS, "messages"))
    with client.messages.stream(model="asked", max_tokens=9, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Let me look. ☂"
    assert {**final.to_dict(), "stop_details": None} == {
        **whole_body(THOUGHT_AND_CALLS, "messages"),
        "stop_details": None,
    }
    assert final.content[2].input == {"city": "Paris", "days": [1, 2]}  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.input_tokens, final.usage.cache_read_input_tokens) == ("tool_use", 20, 10)


def test_the_openai_chat_stream_helper_ends_with_the_whole_answer():
    client = openai_client(client_bytes(THOUGHT_AND_CALLS, "chat"))
    with client.chat.completions.stream(model="asked", messages=MESSAGES) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Let me look. ☂"
    calls = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    assert calls == [("call_a", "weather", {"city": "Paris", "days": [1, 2]}), ("call_b", "now", {})]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None and final.usage.total_tokens == 42


def test_the_openai_responses_stream_helper_ends_with_the_whole_answer():
    client = openai_client(client_bytes(THOUGHT_AND_CALLS, "responses"))
    with client.responses.stream(model="asked", input="Weather?") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Let me look. ☂"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.usage is not None
    assert (final.usage.input_tokens, final.usage.output_tokens_details.reasoning_tokens) == (30, 4)


@settings(max_examples=40, deadline=None)
@given(answers())
def test_every_event_and_every_answer_fits_the_sdks_models(answer: Answer):
    for client in ("chat", "messages", "responses"):
        for event in data_lines(client_bytes(answer, client)):
            EVENTS[client].validate_python(event)
        WHOLE[client].validate_python(whole_body(answer, client))


BROKEN = ApiError(502, "The upstream broke off.", type="upstream_error", code="upstream_stream_truncated")


def test_a_broken_stream_raises_in_the_sdks():
    with pytest.raises(openai.APIError, match="broke off"):
        list(openai_client(client_bytes(THOUGHT_AND_CALLS, "chat", BROKEN)).chat.completions.create(
            model="m", messages=MESSAGES, stream=True
        ))  # fmt: skip
    with pytest.raises(anthropic.APIStatusError, match="broke off"):
        list(anthropic_client(client_bytes(THOUGHT_AND_CALLS, "messages", BROKEN)).messages.create(
            model="m", max_tokens=9, messages=MESSAGES, stream=True
        ))  # fmt: skip
    events = list(openai_client(client_bytes(THOUGHT_AND_CALLS, "responses", BROKEN)).responses.create(
        model="m", input="x", stream=True
    ))  # fmt: skip
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None and last.response.error.message == "The upstream broke off."
    EVENTS["responses"].validate_python(last.to_dict())


@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (400, anthropic.BadRequestError),
        (401, anthropic.AuthenticationError),
        (403, anthropic.PermissionDeniedError),
        (404, anthropic.NotFoundError),
        (429, anthropic.RateLimitError),
        (502, anthropic.InternalServerError),
        (503, anthropic.InternalServerError),
    ],
)
def test_an_error_is_the_anthropic_sdks_exception_with_its_type(status: int, raised: type[anthropic.APIStatusError]):
    body = json.dumps(error_payload("messages", ApiError(status, "No."), "req-1")).encode()
    with pytest.raises(raised, match=r"No\.") as caught:
        anthropic_client(body, status).messages.create(model="m", max_tokens=9, messages=MESSAGES)
    assert caught.value.body["type"] == "error"  # type: ignore[index]


def forced(value: Any) -> Any:
    """pydantic validates iterables as they are read: read all of it."""
    if isinstance(value, dict):
        return {name: forced(inner) for name, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [forced(inner) for inner in value]
    return value


@pytest.mark.parametrize("client", list(REQUESTS))
@pytest.mark.parametrize("upstream", list(REQUESTS))
def test_every_body_fits_the_sdks_parameters(client: Dialect, upstream: Dialect):
    sent = translate_request(
        REQUESTS[client],
        client=client,
        upstream=upstream,
        model="asked",
        upstream_model="real",
        request_id="r",
        created_s=1,
    )
    checked = forced(BODIES[upstream].validate_python(sent.body))
    # The SDK has no name for `temperature` any more, since Anthropic's newest models refuse it.
    expected = {name: value for name, value in sent.body.items() if (upstream, name) != ("messages", "temperature")}
    assert checked == json.loads(json.dumps(expected))
    assert sent.body["model"] == "real"


def test_lists_of_models_and_counts_fit_the_sdks_models():
    cards = [ModelCard(id="a", created_s=5), ModelCard(id="b", display_name="Bee", context_window=4096)]
    assert [Model.model_validate(model).id for model in openai_models(cards)["data"]] == ["a", "b"]
    page = anthropic_models(cards, limit=1)
    assert ModelInfo.model_validate(page["data"][0]).display_name == "a"
    assert (page["has_more"], page["last_id"]) == (True, "a")
    assert anthropic_models(cards, after_id="a")["data"][0]["display_name"] == "Bee"
    assert MessageTokensCount.model_validate(token_count("messages", 7)).input_tokens == 7
