"""Codex and Claude Code (npm) on the engine itself, without a gateway: a tool is called, run, its result comes back.

The model is a tiny random Llama with room for an agent's prompt. What it says is forced by grammars: a proxy narrows
the agents' own tools to the one call that the test needs, and the last answer to one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.npm_tools import npm_install, run_tool
from tests.services.forcing_proxy import ForcingProxy, exactly, forcing_proxy
from tests.services.test_claude_code import CLAUDE_CODE_NPM_VERSION
from tests.services.test_codex import CODEX_NPM_VERSION
from tests.serving import Server, running_server
from tests.tiny_models import tiny_llama

WORD = "turbine"
ANSWER = {"type": "json_schema", "name": "answer", "schema": exactly(word=WORD)}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("engine")
    model = tiny_llama(folder / "model", bundled_tokenizer=True, max_positions=131_072)
    flags = ("--model", str(model), "--served-model-name", "tiny", "--kv-cache-memory-bytes", "128M")
    with running_server(folder / "server.log", flags) as server:
        yield server


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "note.txt").write_text(f"the secret word is {WORD}\n")
    return folder


def said(proxy: ForcingProxy, kind: str) -> list[Any]:
    """What the agent sent, of the requests that offer tools, in all items or blocks of this type."""
    found = []
    for _, body in proxy.requests:
        for item in body.get("input") or [block for message in body.get("messages", []) for block in _blocks(message)]:
            if item.get("type") == kind and item not in found:
                found.append(item)
    return found


def _blocks(message: Any) -> list[Any]:
    return message["content"] if isinstance(message["content"], list) else []


def test_codex_runs_a_command_that_the_engine_was_made_to_ask_for(engine: Server, work: Path, tmp_path: Path) -> None:
    program = npm_install(tmp_path, f"@openai/codex@{CODEX_NPM_VERSION}") / "codex"

    def force(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if any(item.get("type") == "function_call_output" for item in body["input"]):
            return {**body, "tool_choice": "none", "text": {"format": ANSWER}}
        for tool in body["tools"]:
            if tool.get("name") == "exec_command":
                tool["parameters"] = exactly(cmd="cat note.txt")
        return {**body, "tool_choice": {"type": "function", "name": "exec_command"}}

    home = tmp_path / "home"
    (home / ".codex").mkdir(parents=True)
    with forcing_proxy(engine.url, force) as proxy:
        (home / ".codex" / "config.toml").write_text(
            'model = "tiny"\nmodel_provider = "headrace"\n[model_providers.headrace]\nname = "Headrace"\n'
            f'base_url = "{proxy.url}/v1"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
        )
        options = ["exec", "--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"]
        printed = run_tool([str(program), *options, "What is the secret word in note.txt?"], home, work, {})
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (ran,) = [item for item in items if item["type"] == "command_execution"]
    assert f"the secret word is {WORD}" in ran["aggregated_output"] and ran["exit_code"] == 0
    assert json.loads(items[-1]["text"]) == {"word": WORD}
    (result,) = said(proxy, "function_call_output")
    (call,) = said(proxy, "function_call")
    assert result["call_id"] == call["call_id"] and WORD in json.dumps(result["output"])
    assert json.loads(call["arguments"]) == {"cmd": "cat note.txt"}
    (done,) = [event for event in events if event["type"] == "turn.completed"]
    assert done["usage"]["input_tokens"] > 2000


def test_claude_code_reads_a_file_that_the_engine_was_made_to_ask_for(
    engine: Server, work: Path, tmp_path: Path
) -> None:
    program = npm_install(tmp_path, f"@anthropic-ai/claude-code@{CLAUDE_CODE_NPM_VERSION}") / "claude"

    def force(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if "count_tokens" in path:
            return body
        if not body.get("tools"):
            return {**body, "max_tokens": 8}
        if any(block.get("type") == "tool_result" for message in body["messages"] for block in _blocks(message)):
            format = {"type": "json_schema", "schema": ANSWER["schema"]}
            return {**body, "tool_choice": {"type": "none"}, "output_config": {"format": format}}
        for tool in body["tools"]:
            if tool["name"] == "Read":
                tool["input_schema"] = exactly(file_path=str(work / "note.txt"))
        return {**body, "tool_choice": {"type": "tool", "name": "Read"}}

    home = tmp_path / "home"
    home.mkdir()
    with forcing_proxy(engine.url, force) as proxy:
        environment = {
            "ANTHROPIC_BASE_URL": proxy.url,
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": "tiny",
            "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        options = ["--output-format", "json", "--dangerously-skip-permissions"]
        question = "What is the secret word in note.txt?"
        answer = json.loads(run_tool([str(program), "-p", question, *options], home, work, environment))
    assert answer["is_error"] is False
    assert json.loads(answer["result"]) == {"word": WORD}
    assert answer["num_turns"] == 2
    (result,) = said(proxy, "tool_result")
    (call,) = said(proxy, "tool_use")
    assert call["name"] == "Read" and result["tool_use_id"] == call["id"]
    assert WORD in json.dumps(result["content"])
    assert answer["usage"]["input_tokens"] + answer["usage"].get("cache_read_input_tokens", 0) > 2000
