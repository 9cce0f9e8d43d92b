"""Anthropic's Claude Code (npm) through the gateway: over a chat-completions upstream and over an Anthropic one.

The upstream is scripted: it asks to read a file, is given its lines, and then answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import UPSTREAM_KEY, Gateway, provider, providers, running_gateway
from tests.gateway.npm_tools import npm_install, run_tool
from tests.gateway.replies import chat_stream, messages_stream

CLAUDE_CODE_NPM_VERSION = "2.1.328"

WORD = "turbine"


@dataclass(frozen=True)
class ClaudeCode:
    program: Path
    folder: Path
    gateway: Gateway
    chat: FakeUpstream
    anthropic: FakeUpstream

    @property
    def note(self) -> Path:
        return self.folder / "work" / "note.txt"

    def ask(self, question: str, model: str, *, base_path: str = "") -> dict[str, Any]:
        """What `claude -p --output-format json` prints."""
        home, work = self.folder / "home", self.folder / "work"
        home.mkdir(exist_ok=True)
        work.mkdir(exist_ok=True)
        self.note.write_text(f"the secret word is {WORD}\n")
        environment = {
            "ANTHROPIC_BASE_URL": self.gateway.url + base_path,
            "ANTHROPIC_AUTH_TOKEN": self.gateway.key,
            "ANTHROPIC_MODEL": model,
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        options = ["--output-format", "json", "--dangerously-skip-permissions"]
        printed = run_tool([str(self.program), "-p", question, *options], home, work, environment)
        return json.loads(printed)


@pytest.fixture(scope="module")
def claude(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClaudeCode]:
    folder = tmp_path_factory.mktemp("claude")
    programs = npm_install(folder, f"@anthropic-ai/claude-code@{CLAUDE_CODE_NPM_VERSION}")
    with FakeUpstream() as chat, FakeUpstream() as anthropic:
        config = providers(
            fake=provider(chat.url),
            claude=provider(anthropic.url, "claude", dialect="anthropic", models=["claude-model"]),
        )
        with running_gateway(folder, config) as gateway:
            yield ClaudeCode(programs / "claude", folder, gateway, chat, anthropic)


@pytest.fixture(autouse=True)
def _fresh(claude: ClaudeCode) -> None:
    claude.chat.forget()
    claude.anthropic.forget()


def main_requests(upstream: FakeUpstream) -> list[Any]:
    """Bodies of the conversation's own requests: those that offer tools."""
    return [request.json for request in upstream.requests if request.body and request.json.get("tools")]


def test_claude_code_reads_a_file_through_a_chat_upstream(claude: ClaudeCode) -> None:
    claude.chat.script(
        chat_stream(tool="Read", arguments=json.dumps({"file_path": str(claude.note)})),
        chat_stream("The word is ", f"{WORD}."),
    )
    answer = claude.ask("What is the secret word in note.txt?", "fake")
    assert answer["is_error"] is False
    assert answer["result"] == f"The word is {WORD}."
    assert answer["num_turns"] == 2
    assert answer["usage"]["input_tokens"] == 14 and answer["usage"]["output_tokens"] == 6

    second = main_requests(claude.chat)[1]
    assert "Read" in [tool["function"]["name"] for tool in second["tools"]]
    call = next(m for m in second["messages"] if m.get("tool_calls"))["tool_calls"][0]
    result = next(m for m in second["messages"] if m["role"] == "tool")
    assert result["tool_call_id"] == call["id"]
    assert f"the secret word is {WORD}" in json.dumps(result["content"])


@pytest.mark.parametrize("base_path", ["", "/api"])
def test_an_anthropic_upstream_gets_claude_codes_request_as_it_is(claude: ClaudeCode, base_path: str) -> None:
    claude.anthropic.script(
        messages_stream(tool="Read", arguments=json.dumps({"file_path": str(claude.note)})),
        messages_stream("The word is ", f"{WORD}."),
    )
    answer = claude.ask("What is the secret word in note.txt?", "claude-model", base_path=base_path)
    assert answer["result"] == f"The word is {WORD}."
    request = claude.anthropic.requests[0]
    assert request.path == "/v1/messages"
    assert "claude-code" in request.headers["anthropic-beta"]
    assert request.headers["x-api-key"] == UPSTREAM_KEY
    assert claude.gateway.key not in request.raw_head.decode()
    result = main_requests(claude.anthropic)[1]["messages"][-1]["content"][0]
    assert result["type"] == "tool_result" and f"the secret word is {WORD}" in json.dumps(result)


def test_claude_code_shows_a_broken_stream_as_an_error(claude: ClaudeCode) -> None:
    claude.chat.answer = chat_stream("The word", " is").cut(1)
    with pytest.raises(AssertionError, match="is_error"):
        claude.ask("What is the secret word?", "fake")
