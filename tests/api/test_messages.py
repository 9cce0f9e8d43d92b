"""Anthropic's dialect on the engine itself: its SDK's answers and stream helpers, blocks, tools, errors, counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from headrace.protocol import errors
from headrace.server import replies
from tests.scripted_engine import (
    MAX_MODEL_LEN,
    MODEL,
    ScriptedEngine,
    asgi_client,
    make_app,
    saying,
    tokenizer,
)

QUESTION: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THINKS = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"""


@pytest.fixture
def sdk(url: str, engine: ScriptedEngine) -> Iterator[anthropic.Anthropic]:
    engine.script, engine.num_cached_tokens = saying("Hello there!"), 0
    engine.requests.clear()
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


def prompt_of(engine: ScriptedEngine) -> str:
    return tokenizer().decode(engine.requests[-1].token_ids, skip_special_tokens=False)


def test_an_answer_has_its_text_usage_and_stop_reason(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.num_cached_tokens = 16
    answer = sdk.messages.create(model=MODEL, max_tokens=20, system="Be brief.", messages=QUESTION)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == "Hello there!"  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.stop_sequence, answer.role, answer.model) == (
        "end_turn",
        None,
        "assistant",
        MODEL,
    )
    prompt = len(engine.requests[0].token_ids)
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (prompt - 16, 16)
    assert answer.usage.output_tokens == 4
    assert answer.id.startswith("msg_")
    assert prompt_of(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather in Rome?")


def test_the_stream_helper_gives_text_as_it_comes_and_ends_with_the_whole(sdk: anthropic.Anthropic) -> None:
    whole = sdk.messages.create(model=MODEL, max_tokens=20, messages=QUESTION)
    with sdk.messages.stream(model=MODEL, max_tokens=20, messages=QUESTION) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert pieces == ["Hello", " there", "!"]
    assert [block.text for block in final.content] == [block.text for block in whole.content] == ["Hello there!"]  # type: ignore[union-attr]
    assert final.usage == whole.usage and final.stop_reason == "end_turn"


def test_tools_come_as_blocks_and_their_results_go_back(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.script = saying(f"Let me look.\n{ROME}")
    with sdk.messages.stream(model=MODEL, max_tokens=90, messages=QUESTION, tools=[WEATHER]) as stream:
        inputs = [event.partial_json for event in stream if event.type == "input_json"]
        answer = stream.get_final_message()
    assert json.loads("".join(inputs)) == {"city": "Rome"}
    said, call = answer.content
    assert (said.text, call.type, call.name, call.input) == ("Let me look.", "tool_use", "weather", {"city": "Rome"})  # type: ignore[union-attr]
    assert answer.stop_reason == "tool_use"

    engine.script = saying("It rains.")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain."}]}  # type: ignore[union-attr]
    messages = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    sdk.messages.create(model=MODEL, max_tokens=20, messages=messages, tools=[WEATHER])
    prompt = prompt_of(engine)
    assert f"<|im_start|>assistant\nLet me look.\n{ROME}<|im_end|>" in prompt
    assert "<tool_response>\nRain.\n</tool_response>" in prompt


def test_a_demanded_tool_is_demanded_of_the_engine(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.script = saying(ROME)
    choice: Any = {"type": "tool", "name": "weather"}
    answer = sdk.messages.create(model=MODEL, max_tokens=90, messages=QUESTION, tools=[WEATHER], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    grammar = engine.requests[0].params.grammar
    assert grammar is not None and "weather" in grammar.text


def test_a_stop_sequence_is_named(sdk: anthropic.Anthropic) -> None:
    answer = sdk.messages.create(model=MODEL, max_tokens=20, messages=QUESTION, stop_sequences=[" there"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("Hello", "stop_sequence", " there")  # type: ignore[union-attr]


def test_the_limit_is_what_fits_where_it_is_more(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    sdk.messages.create(model=MODEL, max_tokens=20_000, messages=QUESTION)
    (request,) = engine.requests
    assert request.params.max_tokens == MAX_MODEL_LEN - len(request.token_ids)
    assert sdk.messages.create(model=MODEL, max_tokens=2, messages=QUESTION).stop_reason == "max_tokens"


def test_tokens_are_counted_as_they_are_generated_from(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    asked: Any = {"model": MODEL, "system": "Be brief.", "messages": QUESTION, "tools": [WEATHER]}
    counted = sdk.messages.count_tokens(**asked)
    sdk.messages.create(max_tokens=5, **asked)
    assert counted.input_tokens == len(engine.requests[0].token_ids)


async def events_of(engine: ScriptedEngine, template: str | None = "the model's", **fields: object) -> list[Any]:
    body = {"model": MODEL, "max_tokens": 60, "messages": QUESTION, "stream": True, **fields}
    async with asgi_client(make_app(engine, template=template)) as client:
        answer = await client.post("/v1/messages?beta=true", json=body)
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_the_events_come_in_anthropics_order_with_a_ping() -> None:
    events = await events_of(ScriptedEngine())
    assert [event["type"] for event in events] == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["usage"]["input_tokens"] > 0 and events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["usage"]["output_tokens"] == 4


async def test_thinking_is_a_block_of_its_own_and_its_budget_reaches_the_engine() -> None:
    engine = ScriptedEngine(saying("Hm.</think>Yes."))
    budget = {"type": "enabled", "budget_tokens": 1024}
    events = await events_of(engine, THINKS, thinking=budget)
    blocks = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert blocks == ["thinking", "text"]
    thought = "".join(e["delta"].get("thinking", "") for e in events if e["type"] == "content_block_delta")
    assert thought == "Hm."
    assert engine.requests[0].params.thinking is not None and engine.requests[0].params.thinking.max_tokens == 1024
    engine.script = saying("Yes.")
    await events_of(engine, THINKS, thinking={"type": "disabled"})
    assert tokenizer().decode(engine.requests[1].token_ids).endswith("<think></think>")


async def test_a_model_that_does_not_think_says_so_in_a_header() -> None:
    body = {"max_tokens": 9, "messages": QUESTION, "thinking": {"type": "enabled", "budget_tokens": 1024}, "top_k": 5}
    engine = ScriptedEngine()
    async with asgi_client(make_app(engine)) as client:
        answer = await client.post("/v1/messages", json=body)
    assert answer.status_code == 200 and answer.json()["model"] == MODEL
    assert answer.headers["x-headrace-ignored"] == "thinking"
    assert engine.requests[0].params.top_k == 5


async def test_a_silent_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "PING_S", 0.05)
    events = await events_of(ScriptedEngine(saying(ROME), step_s=0.03), tools=[WEATHER])
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "ping"] and kinds[-1] == "message_stop"


def test_errors_are_anthropics(url: str, sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        sdk.messages.create(model="claude-9", max_tokens=9, messages=QUESTION)
    assert missing.value.body["type"] == "error" and missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        sdk.post("/v1/messages", body={"messages": QUESTION}, cast_to=object)
    with pytest.raises(anthropic.BadRequestError, match="use user or assistant"):
        sdk.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "boss", "content": "x"}])  # type: ignore[typeddict-item]
    engine.refuses = errors.queue_full("The queue is full.")
    try:
        with pytest.raises(anthropic.RateLimitError, match="queue is full"):
            sdk.messages.create(model=MODEL, max_tokens=9, messages=QUESTION)
    finally:
        engine.refuses = None


def test_a_stream_that_breaks_raises(sdk: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.fails_after, engine.failure = 2, errors.engine_error("The engine failed on this request.")
    try:
        with (
            pytest.raises(anthropic.APIStatusError, match="engine failed"),
            sdk.messages.stream(model=MODEL, max_tokens=20, messages=QUESTION) as stream,
        ):
            stream.until_done()
    finally:
        engine.fails_after, engine.failure = None, None
