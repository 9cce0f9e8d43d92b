"""OpenAI's Codex (npm) through the gateway: /responses over an upstream that knows chat completions only.

The upstream is scripted: it asks for one command, is given what the command printed, and then answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import Gateway, provider, providers, running_gateway
from tests.gateway.npm_tools import npm_install, run_tool
from tests.gateway.replies import chat_stream, error, responses_stream

CODEX_NPM_VERSION = "0.169.0"

WORD = "turbine"
COMMAND = json.dumps({"cmd": "cat note.txt"})


@dataclass(frozen=True)
class Codex:
    program: Path
    folder: Path
    gateway: Gateway
    upstream: FakeUpstream

    def ask(self, question: str, model: str) -> list[dict[str, Any]]:
        """The events that `codex exec --json` prints."""
        home, work = self.folder / "home", self.folder / "work"
        (home / ".codex").mkdir(parents=True, exist_ok=True)
        work.mkdir(exist_ok=True)
        (work / "note.txt").write_text(f"the secret word is {WORD}\n")
        (home / ".codex" / "config.toml").write_text(
            f'model = "{model}"\n'
            'model_provider = "headrace"\n'
            "[model_providers.headrace]\n"
            'name = "Headrace"\n'
            f'base_url = "{self.gateway.url}/api/v1"\n'
            'env_key = "TAOTOKEN_API_KEY"\n'
            'wire_api = "responses"\n'
            "request_max_retries = 0\n"
            "stream_max_retries = 0\n"
        )
        options = ["exec", "--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"]
        printed = run_tool([str(self.program), *options, question], home, work, {"TAOTOKEN_API_KEY": self.gateway.key})
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def codex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Codex]:
    folder = tmp_path_factory.mktemp("codex")
    programs = npm_install(folder, f"@openai/codex@{CODEX_NPM_VERSION}")
    with FakeUpstream(without=("/responses",)) as upstream:
        config = providers(fake=provider(upstream.url))
        with running_gateway(folder, config) as gateway:
            yield Codex(programs / "codex", folder, gateway, upstream)


@pytest.fixture(autouse=True)
def _fresh(codex: Codex) -> None:
    codex.upstream.forget()


def agent_text(events: list[dict[str, Any]]) -> str:
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return " ".join(item["text"] for item in items if item["type"] == "agent_message")


def test_codex_runs_a_command_and_reports_what_it_printed(codex: Codex) -> None:
    codex.upstream.script(
        chat_stream(tool="exec_command", arguments=COMMAND),
        chat_stream("The word is ", f"{WORD}."),
    )
    events = codex.ask("What is the secret word in note.txt?", "fake")
    assert agent_text(events) == f"The word is {WORD}."
    (done,) = [event for event in events if event["type"] == "turn.completed"]
    assert done["usage"]["input_tokens"] == 14 and done["usage"]["output_tokens"] == 6

    first, second = codex.upstream.requests
    assert first.path == second.path == "/v1/chat/completions"
    body = second.json
    assert "exec_command" in [tool["function"]["name"] for tool in body["tools"]]
    call = next(m for m in body["messages"] if m.get("tool_calls"))
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == json.loads(COMMAND)
    result = next(m for m in body["messages"] if m["role"] == "tool")
    assert f"the secret word is {WORD}" in json.dumps(result["content"])
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    assert "client_metadata" not in body


def test_codex_is_told_when_the_stream_breaks(codex: Codex) -> None:
    codex.upstream.answer = chat_stream("The word", " is").cut(1)
    with pytest.raises(AssertionError, match=r"turn\.failed"):
        codex.ask("What is the secret word?", "fake")


def test_codex_shows_the_upstreams_refusal(codex: Codex) -> None:
    codex.upstream.answer = error(400, "This model cannot do that.")
    with pytest.raises(AssertionError, match="This model cannot do that"):
        codex.ask("What is the secret word?", "fake")


def test_an_upstream_that_knows_responses_gets_codexs_request_as_it_is(codex: Codex, tmp_path: Path) -> None:
    with FakeUpstream(responses_stream("Yes.")) as upstream:
        config = providers(fake=provider(upstream.url))
        with running_gateway(tmp_path, config) as gateway:
            native = Codex(codex.program, tmp_path, gateway, upstream)
            assert agent_text(native.ask("Are you there?", "fake")) == "Yes."
        assert upstream.last.path == "/v1/responses"
        assert upstream.last.json["store"] is False
