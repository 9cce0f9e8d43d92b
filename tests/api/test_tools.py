"""Tools over HTTP: what the model is shown, calls that come back, whole and streamed, and what the engine must do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.scripted_engine import (
    MODEL,
    ScriptedEngine,
    asgi_client,
    make_app,
    saying,
    server_settings,
    tokenizer,
)

QUESTION: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS: list[Any] = [WEATHER, CLOCK]

ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>{"name": "clock"}</tool_call>'

QWEN_LIKE = """{%- if tools %}<|im_start|>system
# Tools {{ tools | tojson }} Return <tool_call></tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} \
{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture
def sdk(url: str, engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    engine.requests.clear()
    engine.aborted.clear()
    with openai.OpenAI(base_url=url + "/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def prompt_of(engine: ScriptedEngine) -> str:
    return tokenizer().decode(engine.requests[-1].token_ids, skip_special_tokens=False)


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_calls_come_back_with_ids_and_the_finish_reason(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(f"Let me look.\n{ROME}\n{NOW}")
    choice = sdk.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS).choices[0]
    assert calls_of(choice.message) == [("weather", {"city": "Rome"}), ("clock", {})]
    assert choice.message.content == "Let me look."
    assert choice.finish_reason == "tool_calls"
    ids = [call.id for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)


def test_a_stream_tells_each_call_under_its_index_and_ends_for_them(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(f"Let me look.\n{ROME}\n{NOW}")
    calls: dict[int, dict[str, str]] = {}
    content, reasons = "", []
    for chunk in sdk.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            known["id"] += call.id or ""
            known["name"] += call.function.name or ""
            known["arguments"] += call.function.arguments or ""
    assert content == "Let me look."
    assert [(call["name"], json.loads(call["arguments"])) for _, call in sorted(calls.items())] == [
        ("weather", {"city": "Rome"}),
        ("clock", {}),
    ]
    assert list(calls) == [0, 1] and len({call["id"] for call in calls.values()}) == 2
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


def test_the_openai_stream_helper_collects_the_calls(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(f"{ROME}{NOW}")
    with sdk.chat.completions.stream(model=MODEL, messages=QUESTION, tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, json.loads(event.arguments)) for event in done] == [
        ("weather", {"city": "Rome"}),
        ("clock", {}),
    ]
    assert final.choices[0].finish_reason == "tool_calls"


def test_an_answer_without_calls_is_text_as_ever(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying("It rains.\n")
    choice = sdk.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It rains.\n", None, "stop")


def test_a_call_cut_by_the_limit_stays_text(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(ROME)
    for stream in (False, True):
        answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, max_tokens=9, stream=stream)
        if stream:
            choices = [chunk.choices[0] for chunk in answer]
            text, reason = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
        else:
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert answer.choices[0].message.tool_calls is None
        assert ROME.startswith(text) and len(text) > 15
        assert reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_answer_ends_with_the_first(
    sdk: openai.OpenAI, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = saying(f"{ROME}\n{NOW} and more")
    answer = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=TOOLS, parallel_tool_calls=False, stream=stream
    )
    if stream:
        chunks = list(answer)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        indexes = {call.index for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()}
        assert indexes == {0}
    else:
        assert calls_of(answer.choices[0].message) == [("weather", {"city": "Rome"})]
        assert answer.choices[0].finish_reason == "tool_calls"
    assert engine.aborted and not engine.running


def test_several_choices_call_each_for_themselves(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda prompt, params, index: saying([ROME, "No tool."][index])(prompt, params, index)
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "stop"]


def test_a_template_without_tools_is_told_of_them_in_words(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying("Fine.")
    messages = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
    ]
    sdk.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    prompt = prompt_of(engine)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call tools.")
    assert json.dumps(WEATHER["function"]) in prompt and '"name": "clock"' in prompt
    assert f"<|im_start|>assistant\n{ROME}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\nRain.\n</tool_response><|im_end|>" in prompt


async def test_a_template_with_tools_gets_them_and_calls_with_arguments_as_objects() -> None:
    engine = ScriptedEngine(saying(ROME))
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "Rain."}
    messages = [*QUESTION, {"role": "assistant", "tool_calls": [call]}, result]
    async with asgi_client(make_app(engine, template=QWEN_LIKE)) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS})
        counted = await client.post("/tokenize", json={"messages": messages, "tools": TOOLS})
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    prompt = prompt_of(engine)
    assert f"# Tools {json.dumps(TOOLS)}" in prompt
    assert '<tool_call>weather {"city": "Rome"}</tool_call>' in prompt
    assert "<|im_start|>tool\nRain.<|im_end|>" in prompt
    assert counted.json()["count"] == len(engine.requests[0].token_ids)


async def test_with_tool_choice_none_the_model_is_not_shown_the_tools() -> None:
    engine = ScriptedEngine(saying(ROME))
    async with asgi_client(make_app(engine, template=QWEN_LIKE)) as client:
        body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": "none"}
        answer = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert "# Tools" not in prompt_of(engine)
    assert (answer["message"]["content"], answer["finish_reason"]) == (ROME, "stop")


async def test_a_template_whose_calls_nobody_can_read_needs_the_flag() -> None:
    template = QWEN_LIKE.replace("Return <tool_call></tool_call>", "Return <arg_key>f</arg_key>")
    body = {"messages": QUESTION, "tools": TOOLS}
    async with asgi_client(make_app(ScriptedEngine(), template=template)) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "--tool-call-parser" in answer.json()["message"]
    settings = server_settings(tool_call_parser="hermes")
    async with asgi_client(make_app(ScriptedEngine(saying(ROME)), settings, template=template)) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_required_call_is_demanded_of_the_engine(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(ROME)
    sdk.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice="required")
    grammar = engine.requests[0].params.grammar
    assert grammar is not None and grammar.kind == "lark" and grammar.field == "tools"
    assert r'"<tool_call>\n{\"name\": \"weather\", \"arguments\": "' in grammar.text
    assert r'"<tool_call>\n{\"name\": \"clock\", \"arguments\": "' in grammar.text
    named: Any = {"type": "function", "function": {"name": "weather"}}
    sdk.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice=named)
    grammar = engine.requests[1].params.grammar
    assert grammar is not None and "weather" in grammar.text and "clock" not in grammar.text
    assert "clock" in prompt_of(engine)


def test_strict_tools_bind_only_what_is_written_as_their_call(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying("It rains.")
    sdk.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS)
    assert engine.requests[0].params.grammar is None
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    sdk.chat.completions.create(model=MODEL, messages=QUESTION, tools=[strict, CLOCK])
    grammar = engine.requests[1].params.grammar
    assert grammar is not None and "TEXT" in grammar.text and '"city"' in grammar.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": "f"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "requird"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "wether"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
async def test_tools_that_cannot_be_used_are_refused_by_place(fields: dict[str, object], param: str) -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": QUESTION, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    if "wether" in json.dumps(fields):
        assert "`weather`" in answer.json()["message"]
