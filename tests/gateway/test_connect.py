"""`headrace connect` and `headrace gateway check`: settings for tools, and whether a configuration works."""

from __future__ import annotations

import json
import shlex
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from headrace.cli.main import main
from headrace.gateway.config_load import load_config
from tests.serving import free_port

SEEDS = Path(__file__).parents[1] / "data/seeds"
KEY = "sk-hr-canary-0123456789abcdef"
NAMED = ["--key", KEY, "--model", "qwen2-7b"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CODEX_HOME", raising=False)
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def connect(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["connect", *words]) == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else captured.err


@pytest.mark.parametrize("base", ["http://h:1/api", "http://h:1/api/", "http://h:1/api/v1", "http://h:1/api/v1/v1/"])
def test_openai_clients_get_v1_and_claude_code_does_not(capsys: pytest.CaptureFixture[str], base: str) -> None:
    assert "'http://h:1/api/v1/chat" in connect(capsys, "curl", *NAMED, "--base-url", base).replace("curl ", "curl '")
    assert '"ANTHROPIC_BASE_URL": "http://h:1/api",' in connect(capsys, "claude-code", *NAMED, "--base-url", base)


def test_codex_speaks_responses_with_the_key_from_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    settings = tomllib.loads(connect(capsys, "codex", *NAMED).split("# and in the shell")[0])
    assert settings == {
        "model": "qwen2-7b",
        "model_provider": "headrace",
        "model_providers": {
            "headrace": {
                "name": "Headrace",
                "base_url": "http://127.0.0.1:8080/v1",
                "env_key": "HEADRACE_API_KEY",
                "wire_api": "responses",
            }
        },
    }


def test_continue_gets_yaml_and_cline_the_three_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    (model,) = yaml.safe_load(connect(capsys, "continue", *NAMED))["models"]
    assert (model["provider"], model["apiBase"], model["apiKey"]) == ("openai", "http://127.0.0.1:8080/v1", KEY)
    printed = connect(capsys, "cline", *NAMED)
    assert json.loads(printed[printed.index("{") :])["modelId"] == "qwen2-7b"


def test_curl_is_one_command_whatever_the_model_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(connect(capsys, "curl", "--key", KEY, "--model", 'it\'s/a "model"'))
    assert words[0] == "curl"
    assert json.loads(words[words.index("-d") + 1])["model"] == 'it\'s/a "model"'
    assert f"Authorization: Bearer {KEY}" in words


def test_the_python_lines_of_openai_are_python(capsys: pytest.CaptureFixture[str]) -> None:
    printed = connect(capsys, "openai", *NAMED)
    compile(printed[printed.index("from openai") :], "snippet", "exec")
    assert f"export OPENAI_API_KEY={KEY}" in printed


def test_a_wrong_tool_or_address_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean codex?" in connect(capsys, "codx", status=2)
    assert "--base-url" in connect(capsys, "curl", "--base-url", "localhost", *NAMED, status=2)
    assert "Did you mean --model?" in connect(capsys, "curl", "--modle", "x", status=2)


@pytest.mark.parametrize("tool", ["codex", "claude-code", "continue"])
def test_a_new_settings_file_is_written_for_its_owner_only(
    capsys: pytest.CaptureFixture[str], home: Path, tool: str
) -> None:
    connect(capsys, tool, "--write", *NAMED)
    path = {
        "codex": home / ".codex/config.toml",
        "claude-code": home / ".claude/settings.json",
        "continue": home / ".continue/config.yaml",
    }[tool]
    assert path.stat().st_mode & 0o777 == 0o600
    assert "127.0.0.1:8080" in path.read_text()
    assert "nothing to do" in connect(capsys, tool, "--write", *NAMED)


OLD_FILES = {
    "codex": (
        'model = "gpt-5" # mine\napproval_policy = "never"\n\n[mcp_servers.x]\ncommand = "y"\n\n'
        '[model_providers.headrace]\nname = "old"\nbase_url = "http://old"\n\n[profiles.p]\nmodel = "o3"\n'
    ),
    "claude-code": json.dumps({"model": "opus", "env": {"FOO": "1", "ANTHROPIC_MODEL": "old"}, "hooks": {}}),
    "continue": (
        "name: Mine # my own\nversion: 1.0.0\nschema: v1\nmodels:\n  # the cloud\n  - name: GPT\n    provider: openai\n"
        '    model: gpt\n  - name: "Headrace qwen2-7b"\n    provider: openai\n    model: old\n'
        "context:\n  - provider: code\n"
    ),
}


@pytest.mark.parametrize("tool", list(OLD_FILES))
def test_an_existing_file_keeps_everything_else_and_a_copy(
    capsys: pytest.CaptureFixture[str], home: Path, tool: str
) -> None:
    path = home / "settings"
    path.write_text(OLD_FILES[tool])
    words = [tool, "--write", "--file", str(path), *NAMED]
    refused = connect(capsys, *words, status=2)
    assert "say --yes" in refused
    assert path.read_text() == OLD_FILES[tool]
    printed = connect(capsys, *words, "--yes")
    assert (home / "settings.before-headrace").read_text() == OLD_FILES[tool]
    assert "before-headrace" in printed
    new = path.read_text()
    if tool == "codex":
        table = tomllib.loads(new)
        assert table["model_providers"]["headrace"]["base_url"] == "http://127.0.0.1:8080/v1"
        assert (table["model"], table["approval_policy"]) == ("qwen2-7b", "never")
        assert (table["mcp_servers"], table["profiles"]) == ({"x": {"command": "y"}}, {"p": {"model": "o3"}})
    elif tool == "claude-code":
        settings = json.loads(new)
        assert (settings["model"], settings["hooks"], settings["env"]["FOO"]) == ("opus", {}, "1")
        assert settings["env"]["ANTHROPIC_MODEL"] == "qwen2-7b"
    else:
        table = yaml.safe_load(new)
        assert [model["name"] for model in table["models"]] == ["Headrace qwen2-7b", "GPT"]
        assert table["context"] == [{"provider": "code"}]
        assert "# my own" in new and "# the cloud" in new


def test_a_file_that_is_not_understood_is_left_as_it_is(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    path = home / "settings.json"
    path.write_text("{ // comments\n}")
    assert "is left as it is: it is not valid JSON" in connect(
        capsys, "claude-code", "--write", "--yes", "--file", str(path), *NAMED, status=2
    )
    assert path.read_text() == "{ // comments\n}"


def test_the_change_is_shown_without_the_key(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    path = home / "settings.json"
    path.write_text("{}")
    assert main(["connect", "claude-code", "--write", "--file", str(path), *NAMED]) == 2
    captured = capsys.readouterr()
    assert "ANTHROPIC_AUTH_TOKEN" in captured.out
    assert KEY not in captured.out + captured.err


@pytest.mark.parametrize("name", ["cline.json", "codex-auth.json", "client.json"])
def test_client_files_of_the_guides_are_imported(capsys: pytest.CaptureFixture[str], home: Path, name: str) -> None:
    printed = connect(capsys, "--import", str(SEEDS / name))
    assert "address https://taotoken.net/api" in printed
    assert "你的" not in printed
    connect(capsys, "--import", str(SEEDS / name), "--write")
    imported = load_config(home / "headrace.toml", {})
    direct = load_config(SEEDS / name, {})
    assert dict(imported.upstreams) == dict(direct.upstreams)
    assert (imported.default_model, dict(imported.presets)) == (direct.default_model, dict(direct.presets))
    assert "say --yes" in connect(capsys, "--import", str(SEEDS / name), "--write", status=2)


def test_codex_s_own_auth_json_is_imported_and_its_login_is_not(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    (home / "auth.json").write_text(json.dumps({"OPENAI_API_KEY": KEY, "tokens": {"a": "b"}, "auth_mode": "apikey"}))
    printed = connect(capsys, "--import", str(home / "auth.json"))
    assert "address https://api.openai.com/v1, key sk-hr...cdef" in printed
    assert KEY not in printed
    assert "tokens means nothing to a gateway" in printed


def test_a_gateway_s_own_file_is_not_imported(capsys: pytest.CaptureFixture[str]) -> None:
    assert "`headrace gateway --config`" in connect(capsys, "--import", str(SEEDS / "providers.json"), status=2)


class _Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        authorised = self.headers["authorization"] == f"Bearer {KEY}"
        body = json.dumps({"data": [{"id": "qwen2-7b"}, {"id": "b"}]} if authorised else {"error": {}}).encode()
        self.send_response(200 if authorised else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@pytest.fixture
def upstream() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def check(capsys: pytest.CaptureFixture[str], home: Path, text: str, *words: str, status: int) -> str:
    (home / "g.toml").write_text(text)
    assert main(["gateway", "check", "--config", "g.toml", *words]) == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def config(base_url: str, key: str = KEY, model: str = "qwen2-7b") -> str:
    return f'[upstreams.up]\nbase_url = "{base_url}"\napi_key = "{key}"\nmodels = ["{model}"]\n'


def test_check_shows_the_joined_address_and_asks_the_upstream(
    capsys: pytest.CaptureFixture[str], home: Path, upstream: str
) -> None:
    printed = check(capsys, home, config(upstream), status=0)
    assert f"{upstream}/v1/chat/completions  ok, 2 models" in printed
    answer = json.loads(check(capsys, home, config(upstream), "--json", status=0))
    assert answer["upstreams"][0]["chat_url"] == f"{upstream}/v1/chat/completions"
    assert answer["upstreams"][0]["probes"][0]["models"] == ["qwen2-7b", "b"]


def test_check_tells_a_wrong_key_a_wrong_name_and_a_dead_upstream(
    capsys: pytest.CaptureFixture[str], home: Path, upstream: str
) -> None:
    printed = check(capsys, home, config(upstream, key="sk-wrong"), status=2)
    assert "401: the api_key is not accepted" in printed
    assert "sk-wrong" not in printed
    printed = check(capsys, home, config(upstream, model="qwen2_7b"), status=2)
    assert "does not list qwen2_7b; it has qwen2-7b, b" in printed
    printed = check(capsys, home, config(f"http://127.0.0.1:{free_port()}"), status=2)
    assert "connection refused: nothing listens there" in printed


def test_check_of_a_bad_file_tells_every_mistake(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    text = '[serverr]\n[upstreams.u]\nbase_url = "nope"\n'
    printed = check(capsys, home, text, status=2)
    assert "g.toml:1: unknown key serverr. Did you mean server?" in printed
    assert "g.toml:3: upstreams.u.base_url" in printed
    assert json.loads(check(capsys, home, text, "--json", status=2))["ok"] is False


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gateway", "--prot", "1"], "unknown option --prot. Did you mean --port?"),
        (["gateway", "--port", "99999"], "--port 99999: must be a whole number from 0 to 65535."),
        (["gateway", "--log-level", "loud"], "choose one of debug, info, warning, error"),
        (["gateway", "--config"], "--config needs a value: --config FILE."),
        (["gateway", "chek"], "chek is one word too many"),
    ],
)
def test_a_wrong_command_line_is_told(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["gateway", "--help"], ["gateway", "check", "-h"], ["connect", "--help"]):
        assert main(words) == 0
        assert "--" in capsys.readouterr().out
