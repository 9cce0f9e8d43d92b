"""The SDKs against the gateway over a running engine: the answers are the engine's own, to the letter."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest

from tests.gateway.gateways import ThreadedGateway, threaded_gateway
from tests.serving import MODEL_NAME, Server

MESSAGES = [{"role": "user", "content": "What turns a water wheel?"}]
GREEDY = {"model": MODEL_NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def over_engine(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[ThreadedGateway]:
    config = f'[upstreams.engine]\nbase_url = "{server.base_url}"\nmodels = ["{MODEL_NAME}"]\n'
    with threaded_gateway(tmp_path_factory.mktemp("engine"), config, suffix=".toml") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def answer(server: Server) -> str:
    """What the engine itself says."""
    with openai.OpenAI(base_url=server.base_url, api_key="unused") as client:
        return client.chat.completions.create(**GREEDY).choices[0].message.content or ""


@pytest.fixture
def client(over_engine: ThreadedGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=over_engine.url + "/api", api_key=over_engine.key, max_retries=0) as client:
        yield client


def test_the_engines_model_is_listed(client: openai.OpenAI) -> None:
    assert MODEL_NAME in [model.id for model in client.models.list()]


def test_chat_whole_and_streamed_is_the_engines_own_answer(client: openai.OpenAI, answer: str) -> None:
    assert client.chat.completions.create(**GREEDY).choices[0].message.content == answer
    chunks = client.chat.completions.create(**GREEDY, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer


def test_responses_and_messages_are_the_same_answer_in_other_words(
    client: openai.OpenAI, over_engine: ThreadedGateway, answer: str
) -> None:
    response = client.responses.create(
        model=MODEL_NAME, input=MESSAGES[0]["content"], temperature=0, max_output_tokens=8
    )
    assert response.output_text == answer
    with (
        anthropic.Anthropic(base_url=over_engine.url, api_key=over_engine.key) as other,
        other.messages.stream(
            model=MODEL_NAME, messages=MESSAGES, max_tokens=8, extra_body={"temperature": 0}
        ) as stream,
    ):
        assert "".join(stream.text_stream) == answer


def test_completions_count_the_engines_tokens(client: openai.OpenAI, over_engine: ThreadedGateway) -> None:
    over_engine.forget()
    whole = client.completions.create(model=MODEL_NAME, prompt="The wheel turns because", temperature=0, max_tokens=8)
    (event,) = over_engine.wait_for_events(1)
    assert whole.usage is not None
    assert (event.input_tokens, event.output_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert not event.estimated


def test_eight_threads_all_get_the_engines_answer(client: openai.OpenAI, answer: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: client.chat.completions.create(**GREEDY), range(8)))
    assert [a.choices[0].message.content for a in answers] == [answer] * 8


def test_what_the_engine_refuses_is_refused_in_its_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"4096") as caught:
        client.chat.completions.create(**{**GREEDY, "max_tokens": 1_000_000})
    assert caught.value.code == "context_length_exceeded"
