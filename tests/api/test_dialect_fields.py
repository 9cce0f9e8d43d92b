"""Fields of the other dialects whose effect must not be lost: forced calls, begun answers, limits, items by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.scripted_engine import MODEL, ScriptedEngine, saying, tokenizer

USER: Any = {"role": "user", "content": "Hi"}


@pytest.fixture
def post(url: str, engine: ScriptedEngine) -> Iterator[Any]:
    engine.script, engine.num_cached_tokens = saying("Hello there!"), 0
    engine.requests.clear()
    with httpx.Client(base_url=url, timeout=30) as client:

        def send(path: str, **body: Any) -> httpx.Response:
            whole = {"model": MODEL, **body}
            if path.startswith("/v1/messages"):
                whole = {"max_tokens": 20, "messages": [USER], **whole}
            elif path.startswith("/v1/responses"):
                whole = {"input": "Hi", **whole}
            else:
                whole = {"messages": [USER], **whole}
            return client.post(path, json=whole)

        yield send


def fault(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error.get("param") or "", error["message"]


def prompt_of(engine: ScriptedEngine) -> str:
    return tokenizer().decode(engine.requests[-1].token_ids, skip_special_tokens=False)


SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"tool_choice": {"type": "any"}}),
        ("/v1/messages", {"tool_choice": {"type": "any"}, "tools": []}),
        ("/v1/messages", {"tool_choice": {"type": "any"}, "tools": [SEARCH]}),
        ("/v1/messages", {"tool_choice": {"type": "tool", "name": "f"}}),
        ("/v1/messages", {"tool_choice": {"type": "tool", "name": "web_search"}, "tools": [SEARCH]}),
        ("/v1/messages/count_tokens", {"tool_choice": {"type": "any"}}),
        ("/v1/responses", {"tool_choice": "required"}),
        ("/v1/responses", {"tool_choice": "required", "tools": [{"type": "web_search"}]}),
        ("/v1/responses", {"tool_choice": {"type": "function", "name": "f"}}),
        ("/v1/chat/completions", {"tool_choice": "required"}),
        ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)
def test_a_call_that_no_tool_can_be_is_not_demanded_in_vain(post: Any, path: str, body: Any) -> None:
    status, _, message = fault(post(path, **body))
    assert status == 400 and "tool_choice" in message


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "maxLength": 3}, "type"),
        ({"type": "array", "items": {}}, "type"),
        ({"type": ["string", "null"]}, "type"),
        ({"const": 5}, "const"),
        ({"enum": [{}, "x"]}, "enum"),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_arguments_that_are_no_object_are_refused_with_their_path(
    post: Any, schema: Any, place: str, choice: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    status, param, _ = fault(post("/v1/chat/completions", tools=[tool], tool_choice=choice))
    assert (status, param) == (400, f"tools[0].function.parameters.{place}")


@pytest.mark.parametrize(
    "schema", [{"type": ["object", "null"]}, {"anyOf": [{"type": "string"}, {"type": "object"}]}, {"properties": {}}]
)
def test_arguments_that_may_be_an_object_are_one(post: Any, engine: ScriptedEngine, schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert post("/v1/chat/completions", tools=[tool], tool_choice="required").status_code == 200
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None and '"type":"object"' in grammar.text


def test_a_begun_answer_goes_on(post: Any, engine: ScriptedEngine) -> None:
    begun: Any = {"role": "assistant", "content": "The best answer is ("}
    answer = post("/v1/messages", messages=[USER, begun])
    assert answer.status_code == 200
    assert prompt_of(engine).endswith("<|im_start|>assistant\nThe best answer is (")
    count = post("/v1/messages/count_tokens", messages=[USER, begun]).json()["input_tokens"]
    assert count == len(engine.requests[-1].token_ids)
    parts: Any = {"role": "assistant", "content": [{"type": "text", "text": "Well"}, {"type": "text", "text": ", so"}]}
    post("/v1/messages", messages=[USER, parts])
    assert prompt_of(engine).endswith("<|im_start|>assistant\nWell, so")
    post("/v1/messages", messages=[USER, begun, USER])
    assert prompt_of(engine).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("limit", [0, -1])
def test_no_tokens_at_all_are_no_limit(post: Any, limit: int) -> None:
    for path in ("/v1/messages", "/v1/responses"):
        name = "max_tokens" if path == "/v1/messages" else "max_output_tokens"
        status, _, message = fault(post(path, **{name: limit}))
        assert status == 400 and name in message


def test_an_item_of_a_stored_response_can_be_named(post: Any, engine: ScriptedEngine) -> None:
    first = post("/v1/responses", input="Say hello.").json()
    said = first["output"][0]["id"]
    body = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": said}, USER]
    assert post("/v1/responses", input=body).status_code == 200
    assert "<|im_start|>assistant\nHello there!<|im_end|>" in prompt_of(engine)
    assert post("/v1/responses/input_tokens", input=body).json()["input_tokens"] == len(engine.requests[-1].token_ids)
    status, param, message = fault(post("/v1/responses", input=[{"type": "item_reference", "id": "msg_none"}]))
    assert (status, param) == (400, "input[0].id") and "msg_none" in message


def test_an_effort_without_effect_is_named_and_one_without_meaning_refused(post: Any) -> None:
    said = ("minimal", "low", "medium", "high", "xhigh", "max")
    for effort in said:
        for path, body in (
            ("/v1/chat/completions", {"reasoning_effort": effort}),
            ("/v1/responses", {"reasoning": {"effort": effort}}),
            ("/v1/messages", {"output_config": {"effort": effort}}),
        ):
            answer = post(path, **body)
            assert (answer.status_code, answer.headers["x-headrace-ignored"]) == (200, "reasoning_effort"), path
    assert "x-headrace-ignored" not in post("/v1/chat/completions", reasoning_effort="none").headers
    for path, body, name in (
        ("/v1/chat/completions", {"reasoning_effort": "zz"}, "reasoning_effort"),
        ("/v1/responses", {"reasoning": {"effort": "hihg"}}, "reasoning.effort"),
        ("/v1/messages", {"output_config": {"effort": ""}}, "output_config.effort"),
    ):
        status, _, message = fault(post(path, **body))
        assert status == 400 and f"`{name}`" in message


# errors in the client's words

OWN: Any = {
    "messages": {"name": "f", "input_schema": {"type": "string"}},
    "responses": {"type": "function", "name": "f"},
}
LONG = 9007199254740993
FILE = {"type": "file", "file_id": "x"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/messages", {"tools": [SEARCH, OWN["messages"]]}, "tools[1].input_schema.type"),
        ("/v1/messages/count_tokens", {"tools": [SEARCH, OWN["messages"]]}, "tools[1].input_schema.type"),
        (
            "/v1/responses",
            {"tools": [{"type": "web_search"}, {**OWN["responses"], "parameters": {"type": "array"}}]},
            "tools[1].parameters.type",
        ),
        ("/v1/messages", {"stop_sequences": ["a"] * 5000}, "stop_sequences"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"const": LONG}}}},
            "text.format.schema.const",
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"const": LONG}}}},
            "output_config.format.schema.const",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a.invalid/b.png"}]}]},
            "input",
        ),
        (
            "/v1/messages",
            {"messages": [USER, {"role": "user", "content": [{"type": "image", "source": FILE}]}]},
            "messages",
        ),
    ],
)  # fmt: skip
def test_errors_name_the_fields_that_the_client_sent(post: Any, path: str, body: Any, param: str) -> None:
    status, found, message = fault(post(path, **body))
    assert status == 400
    assert found.startswith(param) if path == "/v1/responses" else param in message
    for foreign in ("response_format", ".function", "messages[", "upstream", "`stop`"):
        assert foreign not in message + found
