"""Errors name what the client sent, in the words of its dialect; a name it gives its request is taken or told."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.scripted_engine import ScriptedEngine

USER = [{"role": "user", "content": "Hi"}]
LONG = "a wheel " * 2000
SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "object", "properties": 5}}

FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
    ("/v1/messages", {"stop_sequences": ["a"] * 200}, "stop_sequences"),
    ("/v1/messages", {"stop_sequences": [5]}, "stop_sequences"),
    ("/v1/messages", {"stop_sequences": "a" * 5000}, "stop_sequences"),
    ("/v1/messages", {"max_tokens": 0}, "max_tokens"),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": "{"}}}, "output_config.format"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/responses", {"max_output_tokens": 10**6}, "max_output_tokens"),
    ("/v1/responses", {"text": {"format": {**SCHEMA, "schema": "{"}}}, "text.format"),
    ("/v1/responses", {"previous_response_id": "resp_none"}, "previous_response_id"),
    ("/v1/chat/completions", {"stop": [""]}, "stop"),
    ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
]


def body_of(path: str, changes: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "/v1/messages": {"messages": USER, "max_tokens": 3},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
        "/v1/chat/completions": {"messages": USER},
        "/v1/completions": {"prompt": "Hi"},
    }[path]
    return {**plain, **changes}


@pytest.mark.parametrize(("path", "changes", "param"), FAULTS)
def test_an_error_names_the_field_as_the_client_did(url: str, path: str, changes: dict[str, Any], param: str) -> None:
    body = body_of(path, changes)
    answer = httpx.post(url + path, json=body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert str(error.get("param", param)).startswith(param)
    foreign = {"stop", "messages", "prompt", "input", "max_tokens", "response_format", "max_completion_tokens"}
    for name in foreign - body.keys():
        assert not re.search(rf"(`|the ){name}\b", error["message"])
    if path != "/v1/responses" or "previous" not in param:
        assert param.partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
def test_an_unknown_response_in_the_path_is_no_previous_one(url: str, method: str, path: str) -> None:
    answer = httpx.request(method, f"{url}/v1/responses/resp_none{path}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "response_not_found", "response_id")
    assert "input" not in error["message"]


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "/v1/chat/completion", "/api/v1/completion", "/nothing", "/v1/audio/speech", "/v1/threads"]
)
def test_an_unknown_path_is_quoted_as_it_was_sent(url: str, path: str) -> None:
    answer = httpx.post(url + path, json={})
    assert answer.status_code in (404, 501)
    assert path in answer.json()["error"]["message"]


UNUSABLE = ["", "a\nb", "caf\u00e9", "a b", "x" * 300, "\x7f"]


@pytest.mark.parametrize("request_id", UNUSABLE)
def test_a_request_id_that_cannot_be_used_is_refused(url: str, request_id: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = httpx.post(url + path, json=body_of(path, {"request_id": request_id}))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "request_id")
        assert "1 to 128 printable ASCII characters" in error["message"]


def test_a_request_id_is_the_answers_name_and_one_of_two_is_told_to_have_no_effect(
    url: str, engine: ScriptedEngine
) -> None:
    ask = body_of("/v1/completions", {"request_id": "mine-1"})
    answer = httpx.post(url + "/v1/completions", json=ask)
    assert (answer.headers["x-request-id"], "x-headrace-ignored" in answer.headers) == ("mine-1", False)
    answer = httpx.post(url + "/v1/completions", json=ask, headers={"x-request-id": "head"})
    assert (answer.headers["x-request-id"], answer.headers["x-headrace-ignored"]) == ("head", "request_id")
    answer = httpx.post(url + "/v1/completions", json=body_of("/v1/completions", {}), headers={"x-request-id": "a b"})
    assert answer.headers["x-headrace-ignored"] == "x-request-id"
    assert answer.headers["x-request-id"] != "a b"
