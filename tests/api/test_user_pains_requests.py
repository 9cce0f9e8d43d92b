"""What people suffer with inference servers, part 2: requests, answers and streams.

The server is the real one; the engine behind it says what it is told to, so that the answer is known.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from headrace.text.detokenizer import Detokenizer
from tests.scripted_engine import (
    MODEL,
    MODEL_PATH,
    ScriptedEngine,
    asgi_client,
    events,
    for_ever,
    listening,
    make_app,
    saying,
    server_settings,
    tokenizer,
    until,
)

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"


async def chat(engine: ScriptedEngine | None = None, settings: Any = None, **fields: object) -> httpx.Response:
    options = {name: fields.pop(name) for name in ("template", "generation_config") if name in fields}
    async with asgi_client(make_app(engine or ScriptedEngine(), settings, **options)) as client:
        return await client.post(CHAT, json={"messages": HELLO, **fields})


def problem(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@pytest.fixture(scope="module")
def slow_engine() -> ScriptedEngine:
    return ScriptedEngine(for_ever, step_s=0.01)


@pytest.fixture(scope="module")
def url(slow_engine: ScriptedEngine) -> Iterator[str]:
    with listening(make_app(slow_engine)) as address:
        yield address


async def test_d09_tool_calls_are_lost_or_broken_when_streamed():
    """Arguments that are no JSON, `{}` dropped, finish_reason "stop", the call as plain text. Ours are the same
    streamed and whole: name, arguments that parse, `{}` where there are none, finish_reason "tool_calls"."""
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    said += '<tool_call>{"name": "now"}</tool_call>'
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<tool_call></tool_call>"
    how = {"template": template, "tools": tools}
    whole = (await chat(ScriptedEngine(saying(said)), **how)).json()["choices"][0]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in whole["message"]["tool_calls"]]
    assert [(name, json.loads(text)) for name, text in calls] == [("weather", {"city": "Köln"}), ("now", {})]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    streamed: dict[int, list[str]] = {}
    reasons = []
    for event in events((await chat(ScriptedEngine(saying(said)), stream=True, **how)).text)[:-1]:
        (choice,) = json.loads(event)["choices"]
        reasons.append(choice["finish_reason"])
        for call in choice["delta"].get("tool_calls") or ():
            parts = streamed.setdefault(call["index"], ["", ""])
            parts[0] += call["function"].get("name") or ""
            parts[1] += call["function"].get("arguments") or ""
    assert [tuple(parts) for _, parts in sorted(streamed.items())] == calls
    assert reasons[-1] == "tool_calls"


async def test_d10_the_whole_answer_lands_in_reasoning_or_the_reasoning_in_the_answer():
    """`content` null, because the server guessed wrong where thinking begins. Ours reads the end of the rendered
    prompt: open or closed, and no text is lost either way."""
    turns = "{% for m in messages %}{{ m.content }}{% endfor %}"
    opens = (
        turns + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
    )
    thinking = (await chat(ScriptedEngine(saying("Hm.</think>Yes.")), template=opens)).json()["choices"][0]["message"]
    assert (thinking["reasoning"], thinking["reasoning_content"], thinking["content"]) == ("Hm.", "Hm.", "Yes.")
    off = {"template": opens, "chat_template_kwargs": {"enable_thinking": False}}
    plain = (await chat(ScriptedEngine(saying("Yes.")), **off)).json()["choices"][0]["message"]
    assert (plain.get("reasoning"), plain["content"]) == (None, "Yes.")


async def test_d11_guided_json_is_silently_ignored(caplog):
    """200, and text that is no JSON, because a release renamed the field. In ours both spellings reach the engine; a
    field that it knows and cannot do is refused by name; one that nobody knows is named in a header and in the log."""
    engine = ScriptedEngine()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for spelling in ({"guided_json": schema}, {"structured_outputs": {"json": schema}}):
        assert (await chat(engine, **spelling)).status_code == 200
    first, second = (sent.params.grammar for sent in engine.requests)
    assert first is not None and (first.kind, first.text) == (second.kind, second.text)
    assert problem(await chat(logits_processors=["x"]))[:2] == (400, "unsupported_parameter")
    with caplog.at_level(logging.WARNING, "headrace.server"):
        answer = await chat(temprature=0.1)
    assert (answer.status_code, answer.headers["x-headrace-ignored"]) == (200, "temprature")
    assert "temprature" in caplog.text


@pytest.mark.parametrize("name", [MODEL, MODEL_PATH, MODEL_PATH.rsplit("/", 1)[1], None])
async def test_d12_the_model_does_not_exist(name):
    """404, although it is the right model under another of its names. Ours goes by its served name, its path, the
    path's last part, or none at all."""
    assert (await chat(**({} if name is None else {"model": name}))).status_code == 200


async def test_d12_a_wrong_name_is_answered_with_the_right_ones():
    answer = await chat(model=MODEL.upper().replace("-", "_") + "x")
    assert problem(answer) == (404, "model_not_found", "model")
    assert f"Did you mean `{MODEL}`?" in answer.json()["message"]


async def test_d13_there_is_no_chat_template_and_nobody_says_so(caplog):
    """The first chat request fails, or a wrong template is used in silence. Ours says so when it starts, and the
    request gets the flag to use; completions work."""
    with caplog.at_level(logging.WARNING, "headrace.server"):
        app = make_app(ScriptedEngine(), template=None)
    assert "has no chat template" in caplog.text and "--chat-template" in caplog.text
    async with asgi_client(app) as client:
        answer = await client.post(CHAT, json={"messages": HELLO})
        assert problem(answer)[:2] == (400, "no_chat_template") and "--chat-template" in answer.json()["message"]
        assert (await client.post("/v1/completions", json={"prompt": "Hi"})).status_code == 200


async def test_d14_the_temperature_is_ignored_because_of_a_file_in_the_model(caplog):
    """generation_config.json changes the defaults and nobody is told. Ours tells: once in the log, in /v1/models and in
    /server_info; and a request's own value always wins."""
    engine = ScriptedEngine()
    with caplog.at_level(logging.INFO, "headrace.server"):
        app = make_app(engine, generation_config={"temperature": 0.3, "top_p": 0.8, "do_sample": True})
    assert '"temperature": 0.3' in caplog.text
    async with asgi_client(app) as client:
        await client.post(CHAT, json={"messages": HELLO})
        await client.post(CHAT, json={"messages": HELLO, "temperature": 0.9})
        shown = (await client.get("/v1/models")).json()["data"][0]["metadata"]["default_sampling"]
        told = (await client.get("/server_info")).json()["default_sampling"]
    assert shown == told and (shown["temperature"], shown["top_p"]) == (0.3, 0.8)
    assert [(sent.params.temperature, sent.params.top_p) for sent in engine.requests] == [(0.3, 0.8), (0.9, 0.8)]


async def test_d15_a_log_probability_of_minus_infinity_is_a_500():
    """ "Out of range float values are not JSON compliant". Ours writes -9999.0, in every route."""
    engine = ScriptedEngine(logprob=float("-inf"))
    answer = await chat(engine, logprobs=True, top_logprobs=3)
    (first, *_) = answer.json()["choices"][0]["logprobs"]["content"]
    assert answer.status_code == 200
    assert first["logprob"] == -9999.0 and first["top_logprobs"][-1]["logprob"] == -9999.0
    async with asgi_client(make_app(engine)) as client:
        completion = await client.post("/v1/completions", json={"prompt": "Hi", "logprobs": 2})
    assert completion.json()["choices"][0]["logprobs"]["token_logprobs"][0] == -9999.0


async def test_d16_characters_are_broken_in_streams_and_prompts_leak():
    """Question marks in the middle of Chinese, or half a word of the prompt in front. Ours sends whole characters only,
    and nothing but what was generated."""
    said = "水车 🌊 é 你好"
    answer = await chat(ScriptedEngine(saying(said)), stream=True)
    deltas = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events(answer.text)[:-1]]
    assert "".join(deltas) == said
    assert "\ufffd" not in "".join(deltas)
    token_ids = tokenizer().encode("🌊", add_special_tokens=False)
    assert len(token_ids) > 1
    piecewise = Detokenizer(tokenizer(), True, True)
    assert [piecewise.add([token_id]) for token_id in token_ids] == [""] * (len(token_ids) - 1) + ["🌊"]


@pytest.mark.parametrize("stream", [True, False])
async def test_d19_the_client_leaves_and_the_engine_goes_on(url, slow_engine, stream):
    """Nobody reads, and the tokens are generated to the end. Ours stops within a step, streamed or not."""
    slow_engine.aborted.clear()
    body = {"messages": HELLO, "max_tokens": 400, "stream": stream}
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        asking = asyncio.create_task(client.post(CHAT, json=body))
        assert await asyncio.to_thread(until, lambda: bool(slow_engine.running))
        asking.cancel()
    assert await asyncio.to_thread(until, lambda: not slow_engine.running)
    assert slow_engine.aborted


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/tokenize", "/invocations", "/pooling", "/docs", "/nothing"]
)
async def test_d22_the_api_key_protects_only_half_of_the_routes(path):
    """Full inference through /invocations without a key. In ours everything is closed but four paths that tell nothing;
    one test walks the whole route table."""
    async with asgi_client(make_app(ScriptedEngine(), server_settings(api_keys=("k",)))) as client:
        for method in ("GET", "POST"):
            assert (await client.request(method, path)).status_code == 401
        for open_path in ("/health", "/ready", "/ping", "/version"):
            assert (await client.get(open_path)).status_code == 200


def test_d31_usage_is_missing_from_streams_or_in_every_chunk(url):
    """Ours follows OpenAI's rule: only if asked for, in one more chunk at the end, without choices."""
    with openai.OpenAI(base_url=url + "/v1", api_key="x") as client:

        def chunks(**more: object) -> list[Any]:
            return list(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, stream=True, **more))

        assert all(chunk.usage is None for chunk in chunks())
        *answer, last = chunks(stream_options={"include_usage": True})
    assert all(chunk.usage is None and chunk.choices for chunk in answer)
    assert (last.choices, last.usage.completion_tokens) == ([], 3)


async def test_d33_prompt_and_max_tokens_do_not_fit_and_something_is_cut_off():
    """Which status, which number, and what was cut? Ours cuts nothing by itself: 400 with prompt, request and limit;
    without max_tokens the answer may have all that fits; cutting the prompt is asked for."""
    engine = ScriptedEngine()
    answer = await chat(engine, max_tokens=600)
    assert problem(answer)[:2] == (400, "context_length_exceeded")
    num_prompt = len(engine.requests[0].token_ids) if engine.requests else None
    assert num_prompt is None
    message = answer.json()["message"]
    assert "maximum context length is 512 tokens" in message and "600 in the completion" in message
    await chat(engine)
    (sent,) = engine.requests
    assert sent.params.max_tokens == 512 - len(sent.token_ids)
    await chat(engine, truncate_prompt_tokens=5)
    assert len(engine.requests[-1].token_ids) == 5


async def test_d34_the_begin_token_comes_twice_with_chat_templates():
    """The template writes it and the tokenizer adds another; answers get worse and nobody knows why. Ours lets the
    template have its way, unless the request asks for the tokenizer's."""
    engine = ScriptedEngine()
    template = "<|im_start|>{% for m in messages %}{{ m.content }}{% endfor %}"
    await chat(engine, template=template)
    begin = tokenizer().encode("<|im_start|>", add_special_tokens=False)
    assert engine.requests[0].token_ids[:2].count(begin[0]) == 1
