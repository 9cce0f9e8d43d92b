"""Thinking over HTTP: its own fields, whole and streamed; what a request may say about it; where it begins."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.scripted_engine import ScriptedEngine, asgi_client, events, make_app, saying, server_settings, tokenizer

QUESTION: list[Any] = [{"role": "user", "content": "Is <think> a word?"}]
TURNS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
"""
OPENS = (
    TURNS
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    + "{% else %}<think>\n{% endif %}{% endif %}"
)
LEAVES = TURNS + "{% endif %}"
CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
CLOCK = {"type": "function", "function": {"name": "clock"}}


async def ask(said: str, template: str = OPENS, settings: Any = None, **fields: object) -> dict[str, Any]:
    app = make_app(ScriptedEngine(saying(said)), settings, template=template)
    async with asgi_client(app) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": QUESTION, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def message_of(body: dict[str, Any]) -> dict[str, Any]:
    return body["choices"][0]["message"]


async def test_thinking_that_the_prompt_opened_has_fields_of_its_own_and_is_counted() -> None:
    body = await ask("Well.\n</think>\n\nYes.")
    message = message_of(body)
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("Well.", "Well.", "Yes.")
    thought = len(tokenizer().encode("Well.\n</think>\n\n", add_special_tokens=False))
    assert 2 < body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= thought
    assert body["usage"]["completion_tokens"] > thought


async def test_a_stream_tells_thinking_first_then_the_answer_and_both_are_the_whole() -> None:
    async with asgi_client(make_app(ScriptedEngine(saying("Well, so.</think>Yes it is.")), template=OPENS)) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": QUESTION, "stream": True})
    deltas = [httpx.Response(200, text=one).json()["choices"][0]["delta"] for one in events(answer.text)[:-1]]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    kinds = ["reasoning" if "reasoning" in delta else "content" for delta in deltas[1:-1]]
    assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"reasoning", "content"}
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Well, so."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes it is."


@pytest.mark.parametrize(
    ("fields", "said", "expected"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "Yes.", (None, "Yes.")),
        ({"enable_thinking": False}, "Yes.", (None, "Yes.")),
        ({"reasoning_effort": "none"}, "Yes.", (None, "Yes.")),
        ({"reasoning_effort": "high"}, "Hm</think>Yes.", ("Hm", "Yes.")),
        ({"include_reasoning": False}, "Hm</think>Yes.", (None, "Yes.")),
        ({"separate_reasoning": False}, "Hm</think>Yes.", (None, "Hm</think>Yes.")),
        ({"max_tokens": 5}, "Hm, I wonder whether it is one or not", ("Hm, I wonder", "")),
        ({"tools": [CLOCK]}, f"Hm</think>{CALL}", ("Hm", None)),
        ({"tools": [CLOCK]}, f"Hm {CALL}", (f"Hm {CALL}", "")),
    ],
)
async def test_where_thinking_begins_and_what_is_told_of_it(
    fields: dict[str, object], said: str, expected: tuple[str | None, str | None]
) -> None:
    message = message_of(await ask(said, **fields))
    assert (message.get("reasoning"), message["content"]) == expected


async def test_thinking_that_the_model_begins_by_itself() -> None:
    message = message_of(await ask("<think>\nHm\n</think>\n\nYes.", LEAVES))
    assert (message["reasoning"], message["content"]) == ("Hm", "Yes.")
    assert message_of(await ask("Yes.", LEAVES))["content"] == "Yes."


async def test_the_flag_names_the_marks_or_switches_them_off() -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    body = await ask("<think>Hm</think>Yes.", plain, server_settings(reasoning_parser="qwen3"))
    assert message_of(body)["reasoning"] == "Hm"
    body = await ask("Hm</think>Yes.", OPENS, server_settings(reasoning_parser="none"))
    assert message_of(body)["content"] == "Hm</think>Yes."


async def test_earlier_thinking_reaches_the_template_under_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        engine = ScriptedEngine(saying("x</think>Yes."))
        messages = [*QUESTION, {"role": "assistant", "content": "No.", name: "Because."}, *QUESTION]
        async with asgi_client(make_app(engine, template=OPENS)) as client:
            await client.post("/v1/chat/completions", json={"messages": messages})
        prompt = tokenizer().decode(engine.requests[0].token_ids, skip_special_tokens=False)
        assert "<think>Because.</think>\nNo." in prompt


async def test_a_budget_is_the_engines_business_and_refused_where_nobody_thinks() -> None:
    engine = ScriptedEngine(saying("Hm</think>Yes."))
    body = {"messages": QUESTION, "thinking_token_budget": 7}
    close, opening = (tuple(tokenizer().encode(mark, add_special_tokens=False)) for mark in ("</think>", "<think>"))
    async with asgi_client(make_app(engine, template=OPENS)) as client:
        await client.post("/v1/chat/completions", json=body)
        negative = await client.post("/v1/chat/completions", json={**body, "thinking_token_budget": -1})
    async with asgi_client(make_app(engine, template=LEAVES)) as client:
        await client.post("/v1/chat/completions", json=body)
    async with asgi_client(make_app(engine)) as client:
        without = await client.post("/v1/chat/completions", json=body)
    budgets = [request.params.thinking for request in engine.requests]
    assert [(b.max_tokens, b.end_token_ids, b.begin_token_ids) for b in budgets if b is not None] == [
        (7, close, ()),
        (7, close, opening),
    ]
    for answer in (negative, without):
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"


async def test_a_wish_without_effect_is_named() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        kwargs = {"enable_thinkng": False}
        body = {
            "messages": QUESTION,
            "reasoning_effort": "high",
            "enable_thinking": True,
            "chat_template_kwargs": kwargs,
        }
        answer = await client.post("/v1/chat/completions", json=body)
    assert set(answer.headers["x-headrace-ignored"].split(",")) == {
        "reasoning_effort",
        "enable_thinking",
        "chat_template_kwargs.enable_thinkng",
    }


async def test_a_demanded_call_begins_behind_the_thinking() -> None:
    engine = ScriptedEngine(saying(f"Hm</think>{CALL}"))
    body = {"messages": QUESTION, "tools": [CLOCK], "tool_choice": "required"}
    async with asgi_client(make_app(engine, template=OPENS)) as client:
        choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        await client.post("/v1/chat/completions", json={**body, "enable_thinking": False})
    assert (choice["message"]["reasoning"], choice["finish_reason"]) == ("Hm", "tool_calls")
    after = [request.params.grammar.after_token_ids for request in engine.requests if request.params.grammar]
    assert after == [tuple(tokenizer().encode("</think>", add_special_tokens=False)), ()]
