"""OpenAI's npm client against our server: another implementation than the Python one, with its own stream parser."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving import MODEL_NAME, Server

OPENAI_NPM_VERSION = "6.49.0"
"""The last major version that runs on Node.js 18 and 20."""

SCRIPT = Path(__file__).with_name("openai_client.mjs")

Scenario = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def client_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npm")
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent", f"openai@{OPENAI_NPM_VERSION}"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False)
    assert result.returncode == 0, f"npm install failed\n{result.stdout}\n{result.stderr}"
    shutil.copy(SCRIPT, folder)
    return folder


@pytest.fixture(scope="module")
def scenario(client_folder: Path, server: Server) -> Scenario:
    def play(name: str) -> dict[str, Any]:
        command = ["node", SCRIPT.name, server.base_url, MODEL_NAME, name]
        result = subprocess.run(command, cwd=client_folder, capture_output=True, text=True, timeout=100, check=False)
        assert result.returncode == 0, f"{name}\n{result.stdout}\n{result.stderr}"
        return json.loads(result.stdout)

    return play


@pytest.fixture(scope="module")
def whole(scenario: Scenario) -> dict[str, Any]:
    """The answer to the question that most scenarios ask, not streamed."""
    return scenario("whole")


def test_an_answer_has_text_role_finish_reason_and_usage(whole: dict[str, Any]) -> None:
    assert whole["object"] == "chat.completion"
    assert whole["role"] == "assistant"
    assert whole["finish"] in ("stop", "length")
    assert len(whole["text"]) > 20
    usage = whole["usage"]
    assert usage["completion_tokens"] <= 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stream_adds_up_to_the_answer_that_is_not_streamed(scenario: Scenario, whole: dict[str, Any]) -> None:
    streamed = scenario("streamed")
    assert streamed["text"] == whole["text"]
    assert streamed["roles"] == ["assistant"]
    assert streamed["finishes"] == [whole["finish"]]
    assert [u["completion_tokens"] for u in streamed["usages"]] == [whole["usage"]["completion_tokens"]]
    assert streamed["deltas"] >= 10


def test_the_clients_own_accumulator_accepts_every_chunk(scenario: Scenario, whole: dict[str, Any]) -> None:
    helper = scenario("helper")
    assert helper["text"] == helper["joined"] == whole["text"]


def test_completions_are_the_same_streamed_and_whole(scenario: Scenario) -> None:
    completion = scenario("completion")
    assert completion["whole"]
    assert completion["streamed"] == completion["whole"]


def test_the_model_list_names_the_served_model(scenario: Scenario) -> None:
    assert scenario("models") == {"ids": [MODEL_NAME], "one": MODEL_NAME}


def test_a_client_that_leaves_a_stream_is_served_again(scenario: Scenario, whole: dict[str, Any]) -> None:
    leaving = scenario("leaving")
    assert leaving["chunks"] == 5
    assert leaving["text"] == whole["text"]


@pytest.mark.parametrize(
    ("name", "error_class", "status", "code", "param", "part_of_message"),
    [
        ("unknownModel", "NotFoundError", 404, "model_not_found", "model", MODEL_NAME),
        ("tooLong", "BadRequestError", 400, "context_length_exceeded", "max_tokens", "4096"),
        ("badTemperature", "BadRequestError", 400, "invalid_value", "temperature", "-1"),
        ("prediction", "BadRequestError", 400, "unsupported_parameter", "prediction", "prediction"),
    ],
)
def test_a_refusal_becomes_the_clients_typed_error(
    scenario: Scenario, name: str, error_class: str, status: int, code: str, param: str, part_of_message: str
) -> None:
    error = scenario(name)
    assert {k: error.get(k) for k in ("name", "status", "code", "param", "type")} == {
        "name": error_class,
        "status": status,
        "code": code,
        "param": param,
        "type": "invalid_request_error",
    }
    assert part_of_message in error["message"]
