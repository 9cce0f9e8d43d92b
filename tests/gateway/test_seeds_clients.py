"""The guides' own client scripts, run as they stand against the guides' own gateway configurations.

Only addresses and keys are put in: a test cannot reach the guides' hosts. Configuration and scripts that belong
together name the same models.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.gateway.fake_upstream import FakeUpstream, Request, automatic
from tests.gateway.gateways import Gateway, running_gateway
from tests.gateway.replies import Reply, error

SEEDS = Path(__file__).parents[1] / "data" / "seeds"
CLIENTS = SEEDS / "clients"
CHANNEL = "https://taotoken.net/api"
LOCAL_KEY = "sk-your-local-vllm-key"

RUN_TIMEOUT_S = 60


@dataclass(frozen=True)
class Channel:
    """A gateway over one of the guides' configurations; `local` is the model server on this machine."""

    gateway: Gateway
    local: FakeUpstream
    cloud: FakeUpstream

    def script(self, name: str) -> str:
        """A script of the guides with our address and key in it."""
        text = (CLIENTS / name).read_text()
        text = text.replace(CHANNEL, self.gateway.url + "/api")
        for placeholder in ("sk-你的Key", "sk-your-taotoken-key", "你的TaoToken Key", LOCAL_KEY):
            text = text.replace(placeholder, self.gateway.key)
        return text.replace("http://127.0.0.1:8000", self.gateway.url)

    def run_python(self, name: str) -> str:
        return _output([sys.executable, "-c", self.script(name)], {})

    def run_shell(self, name: str) -> str:
        python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return _output(["sh", "-c", self.script(name)], {"TAOTOKEN_API_KEY": self.gateway.key, "PATH": python})


def _output(command: list[str], environment: dict[str, str]) -> str:
    clean = {**os.environ, "NO_PROXY": "*", **environment}
    result = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def pointed(text: str, local: FakeUpstream, cloud: FakeUpstream) -> str:
    """A configuration of the guides with our fake servers as its addresses."""
    for host in ("http://127.0.0.1:8000", "http://localhost:8000"):
        text = text.replace(host, local.url)
    return text.replace(CHANNEL, cloud.url + "/api")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[FakeUpstream, FakeUpstream]]:
    with FakeUpstream() as local, FakeUpstream() as cloud:
        yield local, cloud


@pytest.fixture(autouse=True)
def _fresh(servers: tuple[FakeUpstream, FakeUpstream]) -> None:
    for server in servers:
        server.forget()


@pytest.fixture(scope="module")
def toml_channel(
    tmp_path_factory: pytest.TempPathFactory, servers: tuple[FakeUpstream, FakeUpstream]
) -> Iterator[Channel]:
    """config.toml with settings.json beside it."""
    folder = tmp_path_factory.mktemp("toml")
    (folder / "settings.json").write_text((SEEDS / "settings.json").read_text())
    with running_gateway(folder, pointed((SEEDS / "config.toml").read_text(), *servers), suffix=".toml") as gateway:
        yield Channel(gateway, *servers)


@pytest.fixture(scope="module")
def json_channel(
    tmp_path_factory: pytest.TempPathFactory, servers: tuple[FakeUpstream, FakeUpstream]
) -> Iterator[Channel]:
    """providers.json."""
    folder = tmp_path_factory.mktemp("json")
    config = pointed((SEEDS / "providers.json").read_text(), *servers)
    with running_gateway(folder, config, environment={"TAOTOKEN_API_KEY": "cloud-key-12345"}) as gateway:
        yield Channel(gateway, *servers)


def test_the_sdk_script_reaches_the_local_model_server_with_the_settings_of_settings_json(
    toml_channel: Channel,
) -> None:
    assert toml_channel.run_python("chat_001.py").strip() == "Hello world"
    request = toml_channel.local.last
    assert request.path == "/v1/chat/completions"
    assert request.bearer == LOCAL_KEY
    assert toml_channel.cloud.requests == []
    # settings.json fills in what the script left out, and never makes a stream of it
    body = request.json
    assert (body["temperature"], body["max_tokens"]) == (0.3, 128)
    assert (body["top_p"], body["repetition_penalty"], body["seed"]) == (0.9, 1.05, 42)
    assert not body.get("stream")


def test_eight_threads_all_get_their_answer(toml_channel: Channel) -> None:
    def slow(request: Request) -> Reply:
        return automatic(request).slow(head_s=0.05)

    toml_channel.local.answer = slow
    printed = toml_channel.run_python("threads_001.py")
    assert ast.literal_eval(printed) == ["Hello world"] * 8
    prompts = sorted(request.json["messages"][0]["content"] for request in toml_channel.local.requests)
    assert prompts == sorted(f"第 {i} 个测试请求，回复 OK 即可。" for i in range(8))


def test_curl_lists_the_models_of_the_configuration(toml_channel: Channel) -> None:
    listed = json.loads(toml_channel.run_shell("curl_001.sh"))
    assert {entry["id"] for entry in listed["data"]} == {"qwen2-7b-local", "cloud-fallback"}


def test_a_model_that_is_not_configured_is_named_with_the_nearest(toml_channel: Channel) -> None:
    body = {"model": "qwen2_7b_local", "messages": []}
    with httpx.Client(base_url=toml_channel.gateway.url, headers=toml_channel.gateway.auth) as client:
        answer = client.post("/api/v1/chat/completions", json=body)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert "does not exist" in message and "qwen2-7b-local" in message


def test_curl_gets_choices_through_the_providers_configuration(json_channel: Channel) -> None:
    answer = json.loads(json_channel.run_shell("curl_002.sh"))
    assert answer["choices"][0]["message"]["content"] == "Hello world"
    assert json_channel.local.last.json["model"] == "qwen2.5-7b-awq"


def test_more_than_4096_tokens_go_to_the_channel(json_channel: Channel) -> None:
    with httpx.Client(base_url=json_channel.gateway.url, headers=json_channel.gateway.auth) as client:
        for max_tokens in (4096, 4097):
            body = {"model": "qwen2.5-7b-awq", "messages": [{"role": "user", "content": "?"}], "max_tokens": max_tokens}
            assert client.post("/api/v1/chat/completions", json=body).status_code == 200
    assert [request.json["max_tokens"] for request in json_channel.local.requests] == [4096]
    assert [request.json["max_tokens"] for request in json_channel.cloud.requests] == [4097]
    assert json_channel.cloud.last.bearer == "cloud-key-12345"
    assert json_channel.cloud.last.json["model"] in ("claude-sonnet-4-5", "gpt-4o")


def test_a_local_server_that_fails_is_replaced_by_the_channel(json_channel: Channel) -> None:
    json_channel.local.answer = error(500, "CUDA out of memory")
    answer = json.loads(json_channel.run_shell("curl_002.sh"))
    assert answer["choices"][0]["message"]["content"] == "Hello world"
    assert len(json_channel.cloud.requests) == 1


@pytest.mark.parametrize(
    ("name", "model", "max_tokens"), [("chat_000.py", "qwen2.5-7b", 512), ("chat_004.py", "Qwen2.5-72B-Instruct", 200)]
)
def test_the_other_guides_scripts_run_over_a_gateway_that_serves_their_models(
    tmp_path: Path, servers: tuple[FakeUpstream, FakeUpstream], name: str, model: str, max_tokens: int
) -> None:
    local, cloud = servers
    config = {"providers": {"local": {"base_url": local.url + "/v1", "api_key": "EMPTY", "models": [model]}}}
    with running_gateway(tmp_path, json.dumps(config)) as gateway:
        channel = Channel(gateway, local, cloud)
        assert channel.run_python(name).strip() == "Hello world"
        if model == "qwen2.5-7b":
            shown = json.loads(channel.run_shell("curl_000.sh"))
            assert shown["choices"][0]["message"]["content"] == "Hello world"
    assert local.requests[0].json["model"] == model
    assert local.requests[0].json["max_tokens"] == max_tokens
