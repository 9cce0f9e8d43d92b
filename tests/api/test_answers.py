"""Chat and completions over HTTP: what comes back, whole and streamed, through the openai SDK and in bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.protocol import ipc
from tests.scripted_engine import (
    END_OF_SEQUENCE,
    MODEL,
    ScriptedEngine,
    asgi_client,
    events,
    make_app,
    saying,
    server_settings,
    tokenizer,
)

QUESTION = [{"role": "user", "content": "Say it."}]
EMOJI = "Grüße 😀👩‍👩‍👧 你好 — done"


@pytest.fixture
def sdk(url: str, engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    engine.script, engine.num_cached_tokens, engine.logprob = saying("Hello there!"), 0, -0.25
    engine.requests.clear()
    engine.aborted.clear()
    with openai.OpenAI(base_url=url + "/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def test_a_chat_answer_has_its_text_usage_and_finish_reason(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.num_cached_tokens = 16
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello there!")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    prompt = engine.requests[0].token_ids
    assert tokenizer().decode(prompt, skip_special_tokens=False).endswith("Say it.<|im_end|>\n<|im_start|>assistant\n")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 4)
    assert answer.usage.total_tokens == len(prompt) + 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("fp_")


async def test_a_stream_is_role_then_one_delta_per_token_then_finish_then_done() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": QUESTION, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    data = events(answer.text)
    assert data.pop() == "[DONE]"
    chunks = [json.loads(one) for one in data]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"]["content"] for choice in choices[1:4]] == ["Hello", " there", "!"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["delta"] == {}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)


def test_usage_is_streamed_only_when_asked_in_one_last_chunk_without_choices(sdk: openai.OpenAI) -> None:
    plain = list(sdk.chat.completions.create(model=MODEL, messages=QUESTION, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)
    options = {"include_usage": True}
    asked = list(sdk.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, stream_options=options))
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in asked[:-1])
    assert asked[-1].choices == []
    assert asked[-1].usage.completion_tokens == 4


def test_several_choices_are_interleaved_with_the_right_index(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    texts = ["First one.", "The second choice is longer.", "3"]
    engine.script = lambda prompt, params, index: saying(texts[index])(prompt, params, index)
    whole = sdk.chat.completions.create(model=MODEL, messages=QUESTION, n=3)
    assert [choice.message.content for choice in whole.choices] == texts
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    streamed = ["", "", ""]
    order = []
    for chunk in sdk.chat.completions.create(model=MODEL, messages=QUESTION, n=3, stream=True):
        choice = chunk.choices[0]
        order.append(choice.index)
        streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert order[:6] == [0, 0, 1, 1, 2, 2]


def test_a_character_of_several_tokens_is_never_broken(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(EMOJI)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in sdk.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    ]
    assert "".join(pieces) == EMOJI
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_left_unfinished_by_the_limit_is_replaced_at_the_end_only(
    sdk: openai.OpenAI, engine: ScriptedEngine
) -> None:
    engine.script = saying("😀")
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("\ufffd", "length")


def test_a_stop_string_ends_the_choice_in_the_engine_too(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying("one two three four five six")
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, stop=["e f", "zzz"])
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("one two thre", "stop", "e f")
    assert engine.aborted[0][1:] == (0, "stop")
    with_it = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, stop="e f", extra_body={"include_stop_str_in_output": True}
    )
    assert with_it.choices[0].message.content == "one two three f"


def test_one_choice_at_its_stop_string_does_not_end_the_other(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    texts = ["a STOP b c d", "a long answer without the word"]
    engine.script = lambda prompt, params, index: saying(texts[index])(prompt, params, index)
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, n=2, stop=" STOP")
    assert [choice.message.content for choice in answer.choices] == ["a", texts[1]]


def test_a_stop_token_id_is_the_stop_reason_and_not_in_the_text(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying("Hello there!")
    mark = tokenizer().encode("!", add_special_tokens=False)[0]
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"stop_token_ids": [mark]})
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("Hello there", "stop", mark)


def test_stop_strings_are_not_looked_for_before_min_tokens(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying("no no no no end")
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, stop=" no", extra_body={"min_tokens": 3})
    assert answer.choices[0].message.content == "no no no"


def test_chat_logprobs_have_exact_bytes_and_no_infinity(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying("a 😀")
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode() == "a 😀"
    assert len(entries) == answer.usage.completion_tokens
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.25, -9999.0]
    streamed = [
        entry
        for chunk in sdk.chat.completions.create(
            model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=2, stream=True
        )
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed[: len(entries) - 1] == entries[:-1]
    engine.logprob = float("nan")
    assert sdk.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True).choices[0].logprobs


def test_completion_logprobs_point_into_the_text(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = sdk.completions.create(model=MODEL, prompt="Go", logprobs=1, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["Hello", " there", "!"]
    assert logprobs.token_logprobs == [-0.25] * 3
    assert logprobs.text_offset == [0, 5, 11]
    assert logprobs.top_logprobs[0] == {"Hello": -0.25}


def test_a_completion_defaults_to_sixteen_tokens(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    sdk.completions.create(model=MODEL, prompt="Go")
    assert engine.requests[0].params.max_tokens == 16


def test_completions_take_texts_token_ids_and_lists_of_either(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    ids = tokenizer().encode("Go on", add_special_tokens=False)
    for prompt in ("Go on", ["Go on"], ids, [ids]):
        engine.requests.clear()
        sdk.completions.create(model=MODEL, prompt=prompt)  # type: ignore[arg-type]
        assert [request.token_ids for request in engine.requests] == [ids]


def test_several_prompts_times_n_come_in_index_order(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    def script(prompt: list[int], params: ipc.SamplingParams, index: int) -> Sequence[int]:
        return saying(f"{tokenizer().decode(prompt)}{index}")(prompt, params, index)

    engine.script = script
    answer = sdk.completions.create(model=MODEL, prompt=["x", "yy", "z"], n=2, echo=True)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(
        enumerate(["xx0", "xx1", "yyyy0", "yyyy1", "zz0", "zz1"])
    )
    assert answer.usage.prompt_tokens == sum(len(request.token_ids) for request in engine.requests)
    texts: dict[int, str] = {}
    for chunk in sdk.completions.create(model=MODEL, prompt=["x", "yy", "z"], n=2, echo=True, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert [texts[index] for index in sorted(texts)] == [choice.text for choice in answer.choices]


def test_every_sampling_field_reaches_the_engine(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": [9]}
    sdk.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0.5,
        top_p=0.8,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"7": -3},
        max_completion_tokens=20,
        seed=42,
        n=2,
        logprobs=True,
        top_logprobs=3,
        extra_body=extra,
    )
    assert engine.requests[0].params == ipc.SamplingParams(
        max_tokens=20, n=2, temperature=0.5, top_p=0.8, top_k=5, min_p=0.1, repetition_penalty=1.2,
        presence_penalty=0.1, frequency_penalty=0.2, logit_bias={7: -3.0}, stop_token_ids=(END_OF_SEQUENCE, 9),
        min_tokens=2, seed=42, logprobs=3,
    )  # fmt: skip


async def test_generation_config_fills_what_the_request_leaves_out_and_models_show_it() -> None:
    engine = ScriptedEngine()
    config = {"temperature": 0.6, "top_k": 20, "bos_token_id": 1}
    overridden = server_settings(override_generation_config={"top_p": 0.9})
    async with asgi_client(make_app(engine, overridden, generation_config=config)) as client:
        await client.post("/v1/chat/completions", json={"messages": QUESTION, "temperature": 0})
        models = (await client.get("/v1/models")).json()
    params = engine.requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 20, 0.9)
    assert models["data"][0]["metadata"]["default_sampling"] == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    async with asgi_client(
        make_app(engine, server_settings(generation_config="none"), generation_config=config)
    ) as client:
        await client.post("/v1/chat/completions", json={"messages": QUESTION})
    assert engine.requests[1].params.temperature == 1.0


async def test_an_unknown_field_has_no_effect_and_is_named_in_a_header() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": QUESTION, "temprature": 1, "zap, ü": 2})
    assert answer.status_code == 200
    assert answer.headers["x-headrace-ignored"] == "temprature,zap???"


async def test_the_request_id_of_the_client_comes_back() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        asked = {"messages": QUESTION, "request_id": "mine"}
        assert (await client.post("/v1/chat/completions", json=asked)).headers["x-request-id"] == "mine"
        headers = {"x-request-id": "abc-1"}
        assert (await client.get("/nowhere", headers=headers)).headers["x-request-id"] == "abc-1"
        assert len((await client.get("/nowhere")).headers["x-request-id"]) == 32


async def test_two_requests_of_one_request_id_do_not_meet_in_the_engine() -> None:
    engine = ScriptedEngine()
    async with asgi_client(make_app(engine), headers={"x-request-id": "same"}) as client:
        for _ in range(2):
            await client.post("/v1/chat/completions", json={"messages": QUESTION})
    assert len({request.request_id for request in engine.requests}) == 2


async def test_developer_messages_text_parts_and_continuation_reach_the_prompt() -> None:
    engine = ScriptedEngine()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": None},
        {"role": "assistant", "content": "It is"},
    ]
    body = {"messages": messages, "continue_final_message": True}
    async with asgi_client(make_app(engine)) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    text = tokenizer().decode(engine.requests[0].token_ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\nIt is"
    )


async def test_token_ids_are_returned_when_asked() -> None:
    engine = ScriptedEngine()
    async with asgi_client(make_app(engine)) as client:
        body = {"messages": QUESTION, "return_token_ids": True}
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        streamed = events((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)[:-1]
    ids = tokenizer().encode("Hello there!", add_special_tokens=False)
    assert whole["choices"][0]["token_ids"] == [*ids, END_OF_SEQUENCE]
    assert whole["prompt_token_ids"] == engine.requests[0].token_ids
    chunks = [json.loads(one)["choices"][0] for one in streamed]
    assert [one for chunk in chunks for one in chunk.get("token_ids", [])] == [*ids, END_OF_SEQUENCE]


ALPHABET = ["a", "ab", " stop", "STOP", "😀", "你好", "é", "\n\n", "END", "EN", "👩‍👩‍👧", " the"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=st.lists(st.sampled_from(ALPHABET), max_size=12),
    noise=st.integers(0, 2**32),
    stop=st.lists(st.sampled_from(["STOP", "END", "好", "ab", "\n\n", "😀", "a st"]), max_size=3),
    include=st.booleans(),
    route=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
)
async def test_a_streamed_answer_is_the_whole_answer(
    pieces: list[str], noise: int, stop: list[str], include: bool, route: str
) -> None:
    """Tokens of real text with random tokens (halves of characters among them) thrown in."""
    rng = random.Random(noise)
    ids = tokenizer().encode("".join(pieces), add_special_tokens=False)
    for _ in range(rng.randrange(4)):
        ids.insert(rng.randrange(len(ids) + 1), rng.randrange(20, 400))
    app = make_app(ScriptedEngine(script=lambda prompt, params, index: [*ids, END_OF_SEQUENCE]))
    body = {"stop": stop, "include_stop_str_in_output": include, "max_tokens": 300}
    body |= {"messages": QUESTION} if route.startswith("/v1/chat") else {"prompt": "Go"}
    async with asgi_client(app) as client:
        whole = (await client.post(route, json=body)).json()["choices"][0]
        data = events((await client.post(route, json={**body, "stream": True})).text)
    assert data[-1] == "[DONE]"
    chunks = [json.loads(one)["choices"][0] for one in data[:-1]]
    if route.startswith("/v1/chat"):
        text, streamed = whole["message"]["content"], "".join(one["delta"].get("content", "") for one in chunks)
    else:
        text, streamed = whole["text"], "".join(one["text"] for one in chunks)
    assert streamed == text
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    found = whole["stop_reason"]
    expected = tokenizer().decode(ids)
    if found is None:
        assert text == expected
        assert not any(one in expected for one in stop)
    else:
        assert expected.startswith(text if include else text + found)
        assert text.endswith(found) or not include
