"""What people meet when something is wrong: each test is named after the symptom, each answer says what to do."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from headrace.config.errors import ConfigError
from headrace.protocol import errors, ipc
from headrace.text.tokenizer import Tokenizer
from tests.scripted_engine import (
    MODEL,
    MODEL_PATH,
    ScriptedEngine,
    asgi_client,
    events,
    listening,
    make_app,
    model_files,
    server_settings,
)
from tests.small_models import write_byte_tokenizer

QUESTION = [{"role": "user", "content": "Hi"}]
KEY = "sk-local-0123456789"


async def ask(
    engine: ScriptedEngine | None = None, path: str = "/v1/chat/completions", **fields: object
) -> httpx.Response:
    """The answer to a plain request with `fields` changed; `...` leaves a field out."""
    body = {"messages": QUESTION, **fields} if "chat" in path else {"prompt": "Hi", **fields}
    async with asgi_client(make_app(engine or ScriptedEngine())) as client:
        return await client.post(path, json={name: value for name, value in body.items() if value is not ...})


def error_of(answer: httpx.Response) -> dict[str, object]:
    """The error of an answer, whose shape is the same everywhere."""
    assert answer.status_code >= 400
    body = answer.json()
    assert set(body) == {"error", "message"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert body["message"] == error["message"]
    assert isinstance(error["code"], str)
    return error


@pytest.fixture(scope="module")
def locked_url() -> Iterator[str]:
    with listening(make_app(ScriptedEngine(), server_settings(api_keys=(KEY,)))) as address:
        yield address


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(make_app(ScriptedEngine())) as address:
        yield address


# 401: "401 locally"


def test_401_locally_because_no_key_was_sent(locked_url: str) -> None:
    answer = httpx.post(locked_url + "/v1/chat/completions", json={"messages": QUESTION})
    assert answer.status_code == 401
    assert error_of(answer)["code"] == "missing_api_key"
    assert "--api-key" in answer.json()["message"]
    assert "Authorization: Bearer" in answer.json()["message"]
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("Bearer" + KEY, "the space after `Bearer` is missing"),
        (KEY, "lacks the word `Bearer`"),
        ("Bearer: " + KEY, "a blank, and nothing else, follows"),
        ("Basic dXNlcjpwYXNz", "its scheme is not `Bearer`"),
        ("Bearer ", "no key follows"),
        ('Bearer ""', "environment variable"),
    ],
)
async def test_401_locally_because_the_header_is_malformed(header: str, said: str) -> None:
    async with asgi_client(make_app(ScriptedEngine(), server_settings(api_keys=(KEY,)))) as client:
        answer = await client.get("/v1/models", headers={"authorization": header})
    assert answer.status_code == 401
    assert error_of(answer)["code"] == "malformed_authorization"
    assert said in answer.json()["message"]
    assert KEY not in answer.text


def test_401_locally_because_the_key_is_another_one(locked_url: str) -> None:
    wrong = openai.OpenAI(base_url=locked_url + "/v1", api_key=KEY + "x")
    with wrong as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    assert KEY not in caught.value.message


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer   {KEY} "},
        {"authorization": f'Bearer "{KEY}"'},
        {"authorization": f"Bearer Bearer {KEY}"},
        {"authorization": f"Bearer {KEY}\r\n"},
        {"x-api-key": KEY},
        {"api-key": f"'{KEY}'"},
    ],
)
async def test_stray_blanks_quotes_and_a_doubled_bearer_are_forgiven(headers: dict[str, str]) -> None:
    async with asgi_client(make_app(ScriptedEngine(), server_settings(api_keys=(KEY,)))) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


def test_without_api_keys_any_key_or_none_works(url: str) -> None:
    for headers in ({}, {"authorization": "Bearer EMPTY"}, {"authorization": "nonsense"}):
        assert httpx.get(url + "/v1/models", headers=headers).status_code == 200


# connection refused because of the path; 404


@pytest.mark.parametrize(
    "path",
    [
        "/chat/completions",
        "/api/v1/chat/completions",
        "/v1/v1/chat/completions",
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/openai/v1/chat/completions",
    ],
)
async def test_a_base_url_with_too_much_or_too_little_path_still_arrives(path: str) -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        request = client.build_request("POST", "http://headrace/x", json={"messages": QUESTION})
        request.url = request.url.copy_with(raw_path=path.encode())
        answer = await client.send(request)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there!"


@pytest.mark.parametrize(
    ("path", "guess"),
    [("/v1/chat/completion", "/v1/chat/completions"), ("/v1/model", "/v1/models"), ("/helth", "/health")],
)
async def test_404_for_a_mistyped_path_names_the_nearest(path: str, guess: str) -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        error = error_of(await client.get(path))
    assert error["code"] == "unknown_endpoint"
    assert f"Did you mean {guess}?" in str(error["message"])


async def test_405_names_the_method_to_use() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = await client.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert error_of(answer)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("path", "feature"),
    [
        ("/classify", "classification"),
        ("/v1/audio/transcriptions", "audio"),
        ("/v2/embed", "embeddings"),
    ],
)
async def test_501_for_an_endpoint_that_is_known_and_not_built(path: str, feature: str) -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = await client.post(path, json={})
    assert answer.status_code == 501
    assert feature in str(error_of(answer)["message"])
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("name", ["smollm2_135m_instruct", "SmolLM2-135m-instruct", "smollm2-135m-instuct"])
def test_the_model_does_not_exist_because_of_case_hyphen_or_a_slip(url: str, name: str) -> None:
    with openai.OpenAI(base_url=url + "/v1", api_key="EMPTY") as client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model=name, messages=QUESTION)
    assert f"The model `{name}` does not exist." in caught.value.message
    assert f"Did you mean `{MODEL}`?" in caught.value.message
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("name", [MODEL, MODEL_PATH, MODEL_PATH + "/", "SmolLM2-135M-Instruct", "", None, ...])
async def test_the_served_name_the_path_its_last_part_and_no_name_at_all_mean_the_model(name: object) -> None:
    answer = await ask(model=name)
    assert answer.json()["model"] == MODEL


async def test_a_model_is_found_by_name_with_slashes_in_it() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        for path in (f"/v1/models/{MODEL}", f"/v1/models/{MODEL_PATH}", f"/models{MODEL_PATH}"):
            assert (await client.get(path)).json()["id"] == MODEL, path
        assert error_of(await client.get("/v1/models/other/name"))["code"] == "model_not_found"


# "Cannot read properties of undefined (reading 'choices')"


async def test_reading_choices_because_max_tokens_is_above_the_models_limit() -> None:
    answer = await ask(max_tokens=2048)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    assert "maximum context length is 512 tokens" in str(error["message"])
    assert "2048 in the completion" in str(error["message"])
    room = int(str(error["message"]).split("`max_tokens` to ")[1].split()[0])
    assert (await ask(max_tokens=room)).status_code == 200


async def test_reading_choices_because_the_messages_are_longer_than_the_context() -> None:
    error = error_of(await ask(messages=[{"role": "user", "content": "word " * 600}]))
    assert error["code"] == "context_length_exceeded"
    assert "Shorten the messages by" in str(error["message"])


async def test_a_very_long_prompt_is_counted_beside_the_loop_and_refused_with_its_length() -> None:
    error = error_of(await ask(messages=[{"role": "user", "content": "word " * 5000}]))
    assert error["code"] == "context_length_exceeded"
    assert " 50" in str(error["message"])


async def test_a_request_that_the_engine_can_never_run_is_refused_with_its_words() -> None:
    engine = ScriptedEngine(refuses=errors.refused("kv_cache_too_small", "It needs 40 blocks, and there are 30."))
    for stream in (False, True):
        answer = await ask(engine, stream=stream)
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "kv_cache_too_small"
        assert answer.headers["content-type"] == "application/json"


async def test_reading_choices_because_the_json_is_malformed() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = await client.post("/v1/chat/completions", content=b'{"messages": [{"role": "user"}')
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "invalid_json"
        assert "line 1 column" in answer.json()["message"]
        twice = await client.post("/v1/chat/completions", content=b'{"messages": [], "messages": []}')
        assert error_of(twice)["code"] == "duplicate_key"


async def test_a_wrong_content_type_is_tolerated() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        content = json.dumps({"messages": QUESTION}).encode()
        headers = {"content-type": "application/x-www-form-urlencoded"}
        assert (await client.post("/v1/chat/completions", content=content, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "usr", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([*QUESTION, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[1].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "function", "content": "x", "name": "f"}], "messages[0].role"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0]"),
        ("hello", "messages"),
        (..., "messages"),
    ],
)
async def test_messages_that_cannot_be_used_are_refused_by_place(messages: object, param: str) -> None:
    answer = await ask(messages=messages)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("guided_json", "{"),
        ("guided_choice", [""]),
        ("best_of", 0),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10**6]),
        ("logprob_token_ids", [1]),
        ("documents", [{"text": "x"}]),
        ("truncate_prompt_tokens", 0),
        ("prompt_logprobs", 21),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("stream_options", {"include_usage": True}),
        ("stream_options", {"include_usages": True}),
        ("top_logprobs", 3),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"messages": []}),
        ("priority", 3),
        ("echo", True),
    ],
)
async def test_a_field_that_would_have_no_effect_is_refused_by_name(field: str, value: object) -> None:
    answer = await ask(**{field: value})
    assert answer.status_code == 400
    assert field in str(error_of(answer)["param"])
    assert f"`{field}`" in answer.json()["message"]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "is empty"),
        ([], "empty list"),
        ([[]], "is empty"),
        ([1, "a"], "mixes"),
        ([49152], "vocabulary is 0 to 49151"),
        ([-1], "vocabulary"),
        ([True], "must be"),
        ({"text": "x"}, "must be"),
    ],
)
async def test_a_prompt_that_cannot_be_used_is_refused(prompt: object, said: str) -> None:
    answer = await ask(path="/v1/completions", prompt=prompt)
    assert answer.status_code == 400
    assert said in str(error_of(answer)["message"])


async def test_a_model_without_chat_template_says_which_flag_helps(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(ScriptedEngine(), template=None)
    assert "--chat-template" in caplog.text
    async with asgi_client(app) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": QUESTION})
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "no_chat_template"
        assert "--chat-template" in answer.json()["message"]
        assert (await client.post("/v1/completions", json={"prompt": "Hi"})).status_code == 200


async def test_a_template_that_refuses_the_messages_is_quoted() -> None:
    app = make_app(ScriptedEngine(), template="{{ raise_exception('roles must alternate') }}")
    async with asgi_client(app) as client:
        error = error_of(await client.post("/v1/chat/completions", json={"messages": QUESTION}))
    assert "roles must alternate" in str(error["message"])


def test_a_generation_config_that_cannot_be_read_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="num_beams"):
        make_app(ScriptedEngine(), server_settings(override_generation_config={"num_beams": 2}))
    with pytest.raises(ConfigError, match="cannot be read"):
        make_app(ScriptedEngine(), server_settings(generation_config="/nowhere"))


# 413, 503, 429, 500


async def test_a_body_over_the_limit_is_413_before_it_is_parsed() -> None:
    app = make_app(ScriptedEngine(), server_settings(max_body_bytes=1000))

    async def chunks() -> object:
        for _ in range(3):
            yield b"x" * 500

    async with asgi_client(app) as client:
        for content in (b"x" * 1001, chunks()):
            answer = await client.post("/v1/chat/completions", content=content)  # type: ignore[arg-type]
            assert answer.status_code == 413
            assert error_of(answer)["code"] == "request_too_large"


def test_a_body_over_the_limit_is_answered_over_a_real_connection() -> None:
    with listening(make_app(ScriptedEngine(), server_settings(max_body_bytes=1000))) as address:
        answer = httpx.post(address + "/v1/chat/completions", content=b"x" * 3_000_000)
    assert answer.status_code == 413


async def test_200_with_empty_content_cannot_happen_while_the_model_loads() -> None:
    loading = ipc.Loading(phase="weights", done=25, total=100)
    engine = ScriptedEngine(state="loading", info=None, healthy=False, loading=loading)
    async with asgi_client(make_app(engine)) as client:
        for answer in (
            await client.post("/v1/chat/completions", json={"messages": QUESTION}),
            await client.post("/v1/completions", json={"prompt": "x"}),
            await client.get("/health"),
            await client.get("/ready"),
            await client.get("/ping"),
        ):
            assert answer.status_code == 503
            assert error_of(answer)["code"] == "engine_loading"
            assert "weights, 25 %" in answer.json()["message"]
            assert int(answer.headers["retry-after"]) >= 1
        assert (await client.get("/version")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200


async def test_while_draining_health_is_alive_and_ready_is_not() -> None:
    engine = ScriptedEngine(state="draining")
    async with asgi_client(make_app(engine)) as client:
        assert (await client.get("/health")).status_code == 200
        assert error_of(await client.get("/readyz"))["code"] == "draining"
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, error_of(refused)["code"]) == (503, "draining")


async def test_health_is_503_when_the_engine_is_frozen() -> None:
    async with asgi_client(make_app(ScriptedEngine(healthy=False))) as client:
        answer = await client.get("/health")
    assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_stuck")


async def test_a_full_queue_is_429_with_retry_after() -> None:
    answer = await ask(ScriptedEngine(refuses=errors.queue_full("1024 requests are waiting already.")))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert error_of(answer)["type"] == "rate_limit_error"


async def test_an_engine_that_dies_before_the_first_token_is_a_proper_status() -> None:
    failure = errors.unavailable("engine_restarting", "The engine died.")
    for stream in (False, True):
        answer = await ask(ScriptedEngine(fails_after=0, failure=failure), stream=stream)
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "engine_restarting"


async def test_an_engine_that_dies_later_is_an_error_in_the_stream_and_no_done() -> None:
    failure = errors.unavailable("engine_restarting", "The engine died.")
    answer = await ask(ScriptedEngine(fails_after=2, failure=failure), stream=True)
    assert answer.status_code == 200
    data = events(answer.text)
    assert json.loads(data[-1])["error"]["code"] == "engine_restarting"
    assert "[DONE]" not in data


def test_the_sdk_raises_when_a_stream_breaks() -> None:
    failure = errors.engine_error("The step failed.")
    with (
        listening(make_app(ScriptedEngine(fails_after=2, failure=failure))) as address,
        openai.OpenAI(base_url=address + "/v1", api_key="EMPTY", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        with pytest.raises(openai.APIError, match="The step failed"):
            list(stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
async def test_a_fault_of_ours_is_a_500_with_an_id_that_the_log_explains(
    stream: bool, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    answer = await ask(ScriptedEngine(fails_after=after, failure=RuntimeError("secret detail")), stream=stream)
    if stream and after:
        error = json.loads(events(answer.text)[-1])["error"]
    else:
        assert answer.status_code == 500
        error = error_of(answer)
    assert error["code"] == "internal_error"
    assert "secret detail" not in answer.text
    error_id = error["message"].split()[-1].rstrip(".")
    assert error_id in caplog.text
    assert "secret detail" in caplog.text


async def test_one_prompt_of_several_that_fails_ends_the_others_in_the_engine() -> None:
    engine = ScriptedEngine(fails_after=2, failure=errors.engine_error("No."))
    answer = await ask(engine, path="/v1/completions", prompt=["a", "b", "c"])
    assert answer.status_code == 500
    assert not engine.running


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a<|im_end|>"}, "prompt"),
        ("/v1/completions", {"prompt": [258]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "<|im_end|>"]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["<|im_end|>"]}, "bad_words"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"258": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [258]}, "allowed_token_ids"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [258]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": [258]}, "logprob_token_ids"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "<|im_end|>"}]}, "messages"),
        ("/tokenize", {"prompt": "<|im_end|>"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "<|im_end|>"}]}, "messages"),
    ],
)
async def test_a_token_that_the_model_has_no_row_for_is_the_request_s_fault(
    tmp_path: Path, path: str, fields: dict[str, object], param: str
) -> None:
    write_byte_tokenizer(tmp_path)
    few_rows = msgspec.structs.replace(model_files().config, vocab_size=258, eos_token_ids=())
    own_tokenizer = Tokenizer.load(dataclasses.replace(model_files(), config=few_rows), tmp_path)
    engine = ScriptedEngine()
    app = make_app(engine, template="{{ messages[0].content }}", own_tokenizer=own_tokenizer)
    async with asgi_client(app) as client:
        answer = await client.post(path, json=fields)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert not engine.requests
