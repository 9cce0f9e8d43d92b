"""Requests from one dialect into another: what is carried over, what is reported, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol.errors import ApiError
from headrace.protocol.translate.conversation import Text, Turn, merged, tool_name
from headrace.protocol.translate.events import Dialect
from headrace.protocol.translate.habits import UpstreamHabits, habits_of
from headrace.protocol.translate.listings import estimated_prompt_tokens
from headrace.protocol.translate.translator import TranslatedRequest, read_request, translate_request
from headrace.protocol.translate.wire import Json
from tests.gateway.answers import names, objects, texts

USER: Json = {"role": "user", "content": "Hi"}
SCHEMA: Json = {"type": "object", "properties": {"q": {"type": "string"}}}


def sent(client: Dialect, upstream: Dialect, body: Json, habits: UpstreamHabits | None = None) -> TranslatedRequest:
    if client != "responses" and "messages" not in body:
        body = {"messages": [USER], **body}
    if client == "responses" and "input" not in body:
        body = {"input": "Hi", **body}
    return translate_request(
        {"model": "asked", **body},
        client=client,
        upstream=upstream,
        model="asked",
        upstream_model="real",
        request_id="r",
        created_s=1,
        habits=habits,
    )


CALL_BLOCK = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}


def refused(client: Dialect, upstream: Dialect, body: Json) -> tuple[str | None, str | None]:
    with pytest.raises(ApiError) as caught:
        sent(client, upstream, body)
    assert caught.value.status == 400
    return caught.value.param, caught.value.code


@pytest.mark.parametrize("content", ["Well, (", [{"type": "text", "text": "Well, ("}]])
def test_a_begun_answer_goes_on_where_the_upstream_can_and_is_reported_where_not(content: Any):
    body = {"model": "asked", "max_tokens": 5, "messages": [USER, {"role": "assistant", "content": content}]}

    def to(upstream: Dialect, body: Json, **own: Any) -> TranslatedRequest:
        names: Any = {"model": "asked", "upstream_model": "real", "request_id": "r", "created_s": 1}
        return translate_request(body, client="messages", upstream=upstream, **names, **own)

    request = to("chat", body, continues=True)
    assert request.body["messages"][-1] == {"role": "assistant", "content": "Well, ("}
    assert (request.body["continue_final_message"], request.body["add_generation_prompt"]) == (True, False)
    assert request.dropped == ()
    assert to("chat", body).dropped == to("responses", body).dropped == ("messages.prefill",)
    assert "continue_final_message" not in to("chat", body).body
    ended = {**body, "messages": [*body["messages"], USER]}
    called = {**body, "messages": [USER, {"role": "assistant", "content": [CALL_BLOCK]}]}
    for other in (ended, called):
        assert "continue_final_message" not in to("chat", other, continues=True).body


@pytest.mark.parametrize("upstream", ["chat", "messages", "responses"])
def test_a_call_is_not_demanded_of_no_tools(upstream: Dialect):
    assert refused("messages", upstream, {"tool_choice": {"type": "any"}}) == ("tool_choice", "invalid_value")
    assert refused("responses", upstream, {"tool_choice": "required"}) == ("tool_choice", "invalid_value")
    hosted = {"tool_choice": "required", "tools": [{"type": "web_search"}]}
    assert refused("responses", upstream, hosted) == ("tool_choice", "invalid_value")


# system prompts


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_messages_become_anthropics_system(role: str):
    body = sent("chat", "messages", {"messages": [{"role": role, "content": "Be brief."}, USER]}).body
    assert body["system"] == "Be brief."
    assert body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def test_several_system_prompts_are_one_for_chat_because_templates_take_one():
    instructions = {"instructions": "A", "input": [{"role": "developer", "content": "B"}, USER]}
    assert sent("responses", "chat", instructions).body["messages"] == [{"role": "system", "content": "A\n\nB"}, USER]
    blocks = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert sent("messages", "chat", {"system": blocks}).body["messages"][0]["content"] == "A\n\nB"


def test_anthropic_needs_a_message_that_is_not_a_system_one():
    assert refused("chat", "messages", {"messages": [{"role": "system", "content": "x"}]})[0] == "messages"


# tools


def test_tool_results_follow_their_calls_and_go_first():
    history = [
        {"role": "assistant", "content": [
            {"type": "text", "text": "Two."},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"q": "1"}},
            {"type": "tool_use", "id": "b", "name": "f", "input": {}}]},
        {"role": "user", "content": [
            {"type": "text", "text": "And?"},
            {"type": "tool_result", "tool_use_id": "a", "content": "one"},
            {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "no"}],
             "is_error": True}]},
    ]  # fmt: skip
    request = sent("messages", "chat", {"messages": [USER, *history]})
    assert request.body["messages"][1:] == [
        {"role": "assistant", "content": "Two.", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"q":"1"}'}},
            {"id": "b", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "no"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    assert request.dropped == ("tool_result.is_error",)
    back = sent("chat", "messages", {"messages": request.body["messages"]}).body["messages"]
    assert [block["type"] for block in back[2]["content"]] == ["tool_result", "tool_result", "text"]
    assert back[1] == history[0]


def test_a_picture_in_a_tool_result_follows_as_the_users():
    result = [{"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}]
    turn = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": result}]}
    assert sent("messages", "chat", {"messages": [turn]}).body["messages"] == [
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]},
    ]


@pytest.mark.parametrize(
    ("chat", "anthropic", "responses"),
    [
        ("auto", {"type": "auto"}, "auto"),
        ("none", {"type": "none"}, "none"),
        ("required", {"type": "any"}, "required"),
        (
            {"type": "function", "function": {"name": "f"}},
            {"type": "tool", "name": "f"},
            {"type": "function", "name": "f"},
        ),
    ],
)
def test_tool_choice_in_all_dialects(chat: Any, anthropic: Json, responses: Any):
    of_chat = {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}], "tool_choice": chat}
    of_anthropic = {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": anthropic}
    of_responses = {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "tool_choice": responses}
    assert sent("chat", "messages", of_chat).body["tool_choice"] == anthropic
    assert sent("chat", "responses", of_chat).body["tool_choice"] == responses
    assert sent("messages", "chat", of_anthropic).body["tool_choice"] == chat
    assert sent("responses", "chat", of_responses).body["tool_choice"] == chat
    assert sent("responses", "messages", of_responses).body["tool_choice"] == anthropic


def test_parallel_calls_are_forbidden_in_both_dialects():
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = sent("chat", "messages", {"tools": tools, "parallel_tool_calls": False}).body
    assert body["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}
    assert body["tools"] == [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]
    back = sent("messages", "chat", {"tools": body["tools"], "tool_choice": body["tool_choice"]}).body
    assert back["parallel_tool_calls"] is False


def test_a_choice_of_allowed_tools_leaves_only_those():
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("f", "g")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    body = sent("responses", "chat", {"tools": tools, "tool_choice": choice}).body
    assert [tool["function"]["name"] for tool in body["tools"]] == ["g"]
    assert body["tool_choice"] == "required"


def test_a_choice_of_a_tool_that_is_not_there_is_refused():
    assert refused("chat", "messages", {"tool_choice": {"type": "function", "function": {"name": "f"}}}) == (
        "tool_choice",
        "invalid_value",
    )


def test_tools_the_upstream_cannot_run_are_left_out_and_reported():
    tools = [{"type": "web_search"}, {"type": "image_generation"}, {"type": "local_shell"},
             {"type": "function", "name": "f", "parameters": SCHEMA}]  # fmt: skip
    request = sent("responses", "chat", {"tools": tools})
    assert [tool["function"]["name"] for tool in request.body["tools"]] == ["f"]
    assert request.dropped == ("tools.web_search", "tools.image_generation", "tools.local_shell")
    hosted = sent("messages", "chat", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]})
    assert hosted.dropped == ("tools.web_search_20250305",) and "tools" not in hosted.body


def test_custom_and_namespaced_tools_are_functions_with_names_of_their_own():
    tools = [{"type": "custom", "name": "apply_patch", "description": "Patch."},
             {"type": "namespace", "name": "mcp__git", "description": "d",
              "tools": [{"type": "function", "name": "log", "parameters": SCHEMA}]}]  # fmt: skip
    history = [{"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
               {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"},
               {"type": "function_call", "call_id": "2", "name": "log", "namespace": "mcp__git", "arguments": "{}"},
               {"type": "function_call_output", "call_id": "2", "output": "none"}]  # fmt: skip
    request = sent("responses", "chat", {"tools": tools, "input": history})
    assert [tool["function"]["name"] for tool in request.body["tools"]] == ["apply_patch", "mcp__git__log"]
    calls = [message["tool_calls"][0]["function"] for message in request.body["messages"] if "tool_calls" in message]
    assert calls == [
        {"name": "apply_patch", "arguments": '{"input":"*** Begin"}'},
        {"name": "mcp__git__log", "arguments": "{}"},
    ]


def test_long_and_odd_names_are_shortened_and_stay_different():
    long = ["mcp__" + "x" * 80 + end for end in "ab"]
    short = [tool_name(name) for name in long]
    assert len(set(short)) == 2 and all(len(name) == 64 for name in short)
    assert tool_name("a.b") != tool_name("a_b") and tool_name("ok-1") == "ok-1"
    request = sent("messages", "chat", {"tools": [{"name": long[0], "input_schema": SCHEMA}]})
    assert request.exchange.origin(request.body["tools"][0]["function"]["name"]).name == long[0]


def test_old_functions_are_tools():
    body = sent("chat", "messages", {"functions": [{"name": "f"}], "function_call": {"name": "f"}}).body
    assert body["tool_choice"] == {"type": "tool", "name": "f"}


def test_arguments_that_are_no_object_survive_both_ways():
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"q": "cut'}}
    history = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "x"},
    ]
    body = sent("chat", "messages", {"messages": history}).body
    use, result = body["messages"][1]["content"][0], body["messages"][2]["content"][0]
    assert use["input"] == {"_invalid_json": '{"q": "cut'}
    assert use["id"] == result["tool_use_id"] and use["id"].startswith("functions_f_0_")
    back = sent("messages", "chat", {"messages": body["messages"]}).body
    assert back["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"q": "cut'


# limits and sampling


def test_anthropic_always_gets_max_tokens():
    assert sent("chat", "messages", {}, UpstreamHabits(default_max_tokens=77)).body["max_tokens"] == 77
    assert sent("chat", "messages", {"max_tokens": 5, "max_completion_tokens": 6}).body["max_tokens"] == 6
    assert sent("responses", "messages", {"max_output_tokens": 9}).body["max_tokens"] == 9


def test_openais_newer_models_take_the_newer_name():
    assert habits_of("gpt-5.1-codex").max_tokens_field == "max_completion_tokens"
    assert habits_of("openai/o3-mini").max_tokens_field == "max_completion_tokens"
    assert habits_of("gpt-oss-120b").max_tokens_field == habits_of("gpt-4o").max_tokens_field == "max_tokens"
    assert sent("messages", "chat", {"max_tokens": 5}).body["max_tokens"] == 5


def test_temperature_above_one_is_one_for_anthropic_and_reported():
    request = sent("chat", "messages", {"temperature": 1.5, "top_p": 0.9})
    assert (request.body["temperature"], request.body["top_p"], request.dropped) == (1, 0.9, ("temperature",))


def test_claudes_that_refuse_sampling_get_none_of_it():
    body = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    request = sent("chat", "messages", body, habits_of("claude-opus-4-7"))
    assert not body.keys() & request.body.keys()
    assert request.dropped == ("temperature", "top_p", "top_k")
    assert sent("chat", "messages", body, habits_of("claude-opus-4-5-20251101")).body["top_k"] == 40


def test_stop_strings():
    assert sent("chat", "messages", {"stop": "END"}).body["stop_sequences"] == ["END"]
    assert sent("messages", "chat", {"stop_sequences": ["a", "b"]}).body["stop"] == ["a", "b"]
    assert sent("chat", "messages", {"stop": ["\n"]}).dropped == ("stop",)
    assert sent("chat", "responses", {"stop": "END"}).dropped == ("stop",)


def test_unknown_fields_go_to_who_may_know_them():
    extra = {"top_k": 5, "repetition_penalty": 1.1, "chat_template_kwargs": {"x": 1}, "min_p": 0.1}
    assert sent("messages", "chat", extra).body.items() >= extra.items()
    assert sent("responses", "chat", extra).body.items() >= extra.items()
    request = sent("chat", "messages", {**extra, "frequency_penalty": 0, "logprobs": False, "seed": 1})
    assert request.body["top_k"] == 5
    assert request.dropped == ("repetition_penalty", "chat_template_kwargs", "min_p", "seed")
    for upstream in ("chat", "messages"):  # no answer of theirs would be read for it
        request = sent("responses", upstream, {"top_logprobs": 3})
        assert request.dropped == ("top_logprobs",) and "top_logprobs" not in request.body


def test_what_codex_sends_beside_the_conversation_stays_here():
    codex = {"client_metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
             "store": False, "stream": True, "parallel_tool_calls": True, "tools": []}  # fmt: skip
    request = sent("responses", "chat", codex)
    assert request.body == {
        "model": "real",
        "messages": [USER],
        "prompt_cache_key": "k",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert request.dropped == ("client_metadata",)


def test_users_have_short_names_or_none():
    assert sent("messages", "chat", {"metadata": {"user_id": "u"}}).body["user"] == "u"
    assert len(sent("messages", "chat", {"metadata": {"user_id": "u" * 200}}).body["user"]) == 64
    assert sent("chat", "messages", {"user": "u"}).body["metadata"] == {"user_id": "u"}


# formats, thinking


def test_json_schemas_in_all_dialects():
    format = {"name": "n", "schema": SCHEMA, "strict": True}
    chat = {"response_format": {"type": "json_schema", "json_schema": format}}
    assert sent("chat", "responses", chat).body["text"] == {"format": {"type": "json_schema", **format}}
    output = sent("chat", "messages", chat).body["output_config"]
    assert output == {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert sent("messages", "chat", {"output_config": output}).body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SCHEMA},
    }
    text = {"text": {"format": {"type": "json_schema", **format}, "verbosity": "low"}}
    request = sent("responses", "chat", text)
    assert (request.body["response_format"], request.body["verbosity"]) == (chat["response_format"], "low")
    assert sent("chat", "messages", {"response_format": {"type": "json_object"}}).dropped == ("response_format",)


def test_effort_is_a_budget_for_older_claudes_and_an_effort_for_newer_ones():
    body = {"reasoning_effort": "low", "max_tokens": 9000, "temperature": 0.2}
    older = sent("chat", "messages", body, UpstreamHabits(thinking="budget"))
    assert older.body["thinking"] == {"type": "enabled", "budget_tokens": 2048}
    assert older.dropped == ("temperature",)
    newer = sent("chat", "messages", body, UpstreamHabits(thinking="effort")).body
    assert (newer["thinking"], newer["output_config"]) == ({"type": "adaptive"}, {"effort": "low"})
    assert (
        sent("responses", "chat", {"reasoning": {"effort": "high", "summary": "auto"}}).body["reasoning_effort"]
        == "high"
    )
    assert (
        sent("messages", "chat", {"thinking": {"type": "enabled", "budget_tokens": 10000}}).body["reasoning_effort"]
        == "medium"
    )
    assert sent("messages", "chat", {"thinking": {"type": "disabled"}}).dropped == ("thinking",)


def test_a_budget_that_does_not_fit_is_reported():
    request = sent("chat", "messages", {"reasoning_effort": "high", "max_tokens": 1000})
    assert "thinking" not in request.body and request.dropped == ("reasoning_effort",)


def test_signed_thinking_comes_back_to_who_signed_it():
    history = [
        USER,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "messages.sig"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ]
    turns = sent("responses", "messages", {"input": history}).body["messages"]
    assert turns[1]["content"][0] == {"type": "thinking", "thinking": "hm", "signature": "sig"}
    history[1]["encrypted_content"] = "gAAAA"
    request = sent("responses", "messages", {"input": history, "reasoning": {"effort": "low"}})
    assert [block["type"] for block in request.body["messages"][1]["content"]] == ["tool_use"]
    assert request.dropped == ("messages.thinking", "reasoning_effort")


def test_thinking_of_the_present_turn_goes_to_chat_and_older_does_not():
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    old = {"role": "assistant", "content": [thought, {"type": "text", "text": "Hello"}]}
    now = {"role": "assistant", "content": [thought, {"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]}
    messages = sent("messages", "chat", {"messages": [USER, old, USER, now, result]}).body["messages"]
    assert "reasoning_content" not in messages[1]
    assert messages[3]["reasoning_content"] == "hm"


# refusals


@pytest.mark.parametrize(
    ("client", "body", "field"),
    [
        ("chat", {"n": 2}, "n"),
        ("chat", {"modalities": ["audio"]}, "modalities"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"conversation": "c"}, "conversation"),
        ("responses", {"background": True}, "background"),
        ("responses", {"prompt": {"id": "p"}}, "prompt"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ("responses", {"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client: Dialect, body: Json, field: str):
    assert refused(client, "messages", body) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("client", "body", "field"),
    [
        ("chat", {"messages": "Hi"}, "messages"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ("chat", {"temperature": "hot"}, "temperature"),
        ("chat", {"max_tokens": True}, "max_tokens"),
        ("chat", {"n": 0}, "n"),
        ("chat", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("chat", {"tool_choice": "some"}, "tool_choice"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "film"}]}]}, "messages[0].content[0].type"),
        ("messages", {"messages": [{"role": "user", "content": [CALL_BLOCK]}]}, "messages.content"),
        ("messages", {"thinking": {"type": "hard"}}, "thinking.type"),
        ("messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ("messages", {"stop_sequences": [1]}, "stop_sequences[0]"),
        ("responses", {"input": 5}, "input"),
        ("responses", {"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ("responses", {"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused_by_place(client: Dialect, body: Json, field: str):
    assert refused(client, "chat" if client != "chat" else "messages", body)[0] == field


@pytest.mark.timeout(30)
def test_many_turns_of_one_role_become_one_in_a_single_walk():
    turns = [Turn("user", (Text(str(number)),)) for number in range(300_000)]
    (one,) = merged(turns)
    assert len(one.parts) == 300_000 and one.parts[-1] == Text("299999")
    rows = merged(
        [Turn("user", ()), turns[0], Turn("assistant", ()), turns[1], Turn("assistant", (Text("a"),)), turns[2]]
    )
    assert [(row.role, len(row.parts)) for row in rows] == [("user", 2), ("assistant", 1), ("user", 1)]


# there and back


@st.composite
def conversations(draw: st.DrawFn) -> list[Json]:
    """Chat messages in the form the translators write them."""
    messages: list[Json] = [{"role": "system", "content": draw(spoken)}] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(spoken)})
        calls = [
            {"id": f"c{turn}{place}", "type": "function",
             "function": {"name": draw(names), "arguments": json.dumps(draw(objects))}}
            for place in range(draw(st.integers(0, 2)))
        ]  # fmt: skip
        answer: Json = {"role": "assistant", "content": draw(spoken)}
        messages.append({**answer, "tool_calls": calls} if calls else answer)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": draw(spoken)} for call in calls]
    return [*messages, {"role": "user", "content": draw(spoken)}] if messages[-1]["role"] == "assistant" else messages


spoken = texts.filter(lambda text: text.strip())


def parsed(messages: list[Json]) -> list[Json]:
    return json.loads(json.dumps(messages), object_hook=_with_parsed_arguments)


def _with_parsed_arguments(value: Json) -> Json:
    return {**value, "arguments": json.loads(value["arguments"])} if "arguments" in value else value


@settings(max_examples=120, deadline=None)
@given(conversations(), st.sampled_from(["messages", "responses"]))
def test_a_conversation_goes_there_and_comes_back(messages: list[Json], middle: Dialect):
    there = sent("chat", middle, {"messages": messages})
    assert there.dropped == ()
    history = {name: there.body[name] for name in ("messages", "system", "input") if name in there.body}
    back = sent(middle, "chat", history)
    assert parsed(back.body["messages"]) == parsed(messages)
    assert back.dropped == ()


# counting


def test_prompts_are_estimated_from_their_text():
    body = {"system": "x" * 36, "messages": [{"role": "user", "content": "y" * 72}]}
    assert estimated_prompt_tokens(read_request(body, "messages")) == 2 * 4 + 30
