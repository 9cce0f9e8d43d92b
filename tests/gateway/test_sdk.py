"""The official Python SDKs of OpenAI and Anthropic against the gateway: plain, asynchronous, streamed, with tools, and
through every spelling of the base URL."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.gateway import replies
from tests.gateway.dialects import TOOL
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import ThreadedGateway, provider, providers, threaded_gateway

MESSAGES = [{"role": "user", "content": "What turns a water wheel?"}]
OPENAI_TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": TOOL}}
ANTHROPIC_TOOL = {"name": "get_weather", "description": "Weather.", "input_schema": TOOL}
TEXT = "Hello world"


@pytest.fixture(scope="module")
def _chat_only() -> Iterator[FakeUpstream]:
    with FakeUpstream(without=("/responses",)) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def _both(tmp_path_factory: pytest.TempPathFactory, _chat_only: FakeUpstream) -> Iterator[ThreadedGateway]:
    config = providers(main=provider(_chat_only.url, max_retries=0))
    with threaded_gateway(tmp_path_factory.mktemp("chat-only"), config) as gateway:
        yield gateway


@pytest.fixture
def chat_only(_chat_only: FakeUpstream) -> FakeUpstream:
    """An upstream without /responses."""
    _chat_only.forget()
    return _chat_only


@pytest.fixture
def translating(_both: ThreadedGateway) -> ThreadedGateway:
    """The gateway over `chat_only`."""
    _both.forget()
    return _both


def openai_client(gateway: ThreadedGateway, path: str = "/v1", key: str | None = None) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url + path, api_key=key or gateway.key, max_retries=0, timeout=15)


def anthropic_client(gateway: ThreadedGateway, path: str = "", key: str | None = None) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url + path, api_key=key or gateway.key, max_retries=0, timeout=15)


# openai


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/api", "/api/", "/api/v1", "/api/v1/v1"])
def test_every_spelling_of_the_base_url_reaches_the_model(
    gateway: ThreadedGateway, upstream: FakeUpstream, path: str
) -> None:
    with openai_client(gateway, path) as client:
        answer = client.chat.completions.create(model="fake", messages=MESSAGES)
        assert answer.choices[0].message.content == TEXT
        assert [model.id for model in client.models.list()][:1] == ["fake"]
    assert upstream.last.bearer != gateway.key


def test_chat_streamed_adds_up_to_the_whole_answer(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    with openai_client(gateway) as client:
        stream = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks), "usage nobody asked for"
    assert upstream.last.json["stream_options"]["include_usage"] is True


def test_usage_comes_in_a_stream_when_it_is_asked_for(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    with openai_client(gateway) as client:
        stream = client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        (usage,) = [chunk.usage for chunk in stream if chunk.usage]
    assert (usage.prompt_tokens, usage.completion_tokens) == replies.USAGE


def test_the_sdks_own_accumulator_takes_a_streamed_tool_call(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    upstream.script(replies.chat_stream(tool="get_weather"))
    with (
        openai_client(gateway) as client,
        client.chat.completions.stream(model="fake", messages=MESSAGES, tools=[OPENAI_TOOL]) as stream,
    ):
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Ulm"})


async def test_the_asynchronous_client_gets_the_same(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key=gateway.key, max_retries=0) as client:
        whole = await client.chat.completions.create(model="fake", messages=MESSAGES)
        assert whole.choices[0].message.content == TEXT
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT


def test_completions_and_embeddings(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    with openai_client(gateway) as client:
        assert client.completions.create(model="fake", prompt="Hi").choices[0].text == TEXT
        streamed = client.completions.create(model="fake", prompt="Hi", stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == TEXT
        vector = client.embeddings.create(model="fake", input=["Hi"], encoding_format="float").data[0].embedding
    assert vector == [0.5, 0.25]
    assert [event.endpoint for event in gateway.wait_for_events(3)] == ["completions", "completions", "embeddings"]


def test_one_model_is_found_by_its_name_and_another_is_not(gateway: ThreadedGateway) -> None:
    with openai_client(gateway) as client:
        assert client.models.retrieve("fake").id == "fake"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("faker")


def test_responses_whole_streamed_and_with_a_tool_over_a_chat_upstream(
    translating: ThreadedGateway, chat_only: FakeUpstream
) -> None:
    with openai_client(translating) as client:
        assert client.responses.create(model="fake", input="Hi").output_text == TEXT
        events = list(client.responses.create(model="fake", input="Hi", stream=True))
        assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed" and events[-1].response.output_text == TEXT
        assert [event.sequence_number for event in events] == list(range(len(events)))
        chat_only.script(replies.chat_stream(tool="get_weather"))
        tool = {"type": "function", "name": "get_weather", "parameters": TOOL, "strict": False}
        with client.responses.stream(model="fake", input="Hi", tools=[tool]) as stream:
            (item,) = stream.get_final_response().output
    assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "get_weather", {"city": "Ulm"})
    assert {request.path for request in chat_only.requests} == {"/v1/chat/completions"}


def test_responses_pass_through_where_the_upstream_knows_them(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    with openai_client(gateway) as client:
        assert client.responses.create(model="fake", input="Hi", store=False).output_text == TEXT
    assert upstream.last.path == "/v1/responses" and upstream.last.json["input"] == "Hi"


def test_errors_are_the_sdks_typed_ones(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    with openai_client(gateway) as client:
        with pytest.raises(openai.NotFoundError, match=r"does not exist.*fake"):
            client.chat.completions.create(model="fak", messages=MESSAGES)
        upstream.script(replies.unauthorized())
        with pytest.raises(openai.InternalServerError, match="Your own key is fine") as caught:
            client.chat.completions.create(model="fake", messages=MESSAGES)
        assert caught.value.status_code == 502
        upstream.script(replies.rate_limited(5))
        with pytest.raises(openai.RateLimitError) as limited:
            client.chat.completions.create(model="fake", messages=MESSAGES)
        assert limited.value.response.headers["retry-after"] == "5"
        upstream.script(replies.chat_stream("Hel", "lo").cut(1))
        with pytest.raises(openai.APIError, match="incomplete"):
            list(client.chat.completions.create(model="fake", messages=MESSAGES, stream=True))
    with openai_client(gateway, key="sk-hr-" + "x" * 43) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_an_exhausted_budget_is_not_retried_by_the_sdk(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    """429 insufficient_quota with x-should-retry: false; without it the SDK would ask three times."""
    key = gateway.new_key("poor", budget_micros=1)
    with gateway.client_with(key) as plain:
        answer = plain.post("/v1/chat/completions", json={"model": "fake", "messages": MESSAGES})
    assert answer.status_code == 200, "a model without a price costs nothing"
    limited = gateway.new_key("limited", rpm=1)
    with openai.OpenAI(base_url=gateway.url, api_key=limited, max_retries=0) as client:
        client.chat.completions.create(model="fake", messages=MESSAGES)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="fake", messages=MESSAGES)
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) >= 1


# anthropic


@pytest.mark.parametrize("path", ["", "/api", "/anthropic"])
def test_the_anthropic_sdk_over_a_chat_upstream(gateway: ThreadedGateway, upstream: FakeUpstream, path: str) -> None:
    with anthropic_client(gateway, path) as client:
        message = client.messages.create(model="fake", max_tokens=50, system="Be brief.", messages=MESSAGES)
    assert (message.content[0].text, message.stop_reason) == (TEXT, "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == replies.USAGE
    body = upstream.last.json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body.get("max_tokens", body.get("max_completion_tokens")) == 50


def test_the_anthropic_stream_helper_builds_text_and_tool_input(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    with anthropic_client(gateway) as client:
        with client.messages.stream(model="fake", max_tokens=50, messages=MESSAGES) as stream:
            assert "".join(stream.text_stream) == TEXT
            assert stream.get_final_message().usage.output_tokens == replies.USAGE[1]
        upstream.script(replies.chat_stream(tool="get_weather"))
        with client.messages.stream(model="fake", max_tokens=50, messages=MESSAGES, tools=[ANTHROPIC_TOOL]) as stream:
            final = stream.get_final_message()
    (use,) = final.content
    assert (use.type, use.name, use.input, final.stop_reason) == (
        "tool_use",
        "get_weather",
        {"city": "Ulm"},
        "tool_use",
    )


async def test_the_asynchronous_anthropic_client_gets_the_same(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, auth_token=gateway.key, api_key=None) as client:
        message = await client.messages.create(model="fake", max_tokens=50, messages=MESSAGES)
        assert message.content[0].text == TEXT
        async with client.messages.stream(model="fake", max_tokens=50, messages=MESSAGES) as stream:
            assert "".join([text async for text in stream.text_stream]) == TEXT


def test_anthropic_models_and_token_counts(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    with anthropic_client(gateway) as client:
        assert "fake" in [model.id for model in client.models.list()]
        assert client.messages.count_tokens(model="fake", messages=MESSAGES).input_tokens > 3


def test_anthropic_errors_are_the_sdks_typed_ones(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    with anthropic_client(gateway) as client:
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(model="fak", max_tokens=50, messages=MESSAGES)
        upstream.script(replies.rate_limited(5))
        with pytest.raises(anthropic.RateLimitError):
            client.messages.create(model="fake", max_tokens=50, messages=MESSAGES)
        upstream.script(replies.chat_stream("Hel", "lo").cut(1))
        with (
            pytest.raises(anthropic.APIStatusError, match="incomplete"),
            client.messages.stream(model="fake", max_tokens=50, messages=MESSAGES) as stream,
        ):
            stream.get_final_text()
    with anthropic_client(gateway, key="nonsense") as stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="fake", max_tokens=50, messages=MESSAGES)
