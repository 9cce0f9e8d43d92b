"""The guides' configuration files load unchanged, and mean what the guides say."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from headrace.gateway.config_load import InvalidConfig, load_config
from headrace.gateway.route import RequestFacts, decide
from headrace.gateway.snapshot import Snapshot
from headrace.protocol.errors import ApiError

SEEDS = Path(__file__).parents[1] / "data/seeds"
ENVIRONMENT = {"TAOTOKEN_API_KEY": "sk-from-the-environment"}
FILES = ("config.toml", "settings.json", "providers.json", "cline.json", "codex-auth.json", "client.json")


def load(name: str) -> Snapshot:
    return load_config(SEEDS / name, ENVIRONMENT)


def attempts(snapshot: Snapshot, model: str | None, **facts: int) -> list[tuple[str, str]]:
    route = decide(snapshot, RequestFacts(endpoint="chat", model=model, **facts))
    return [(attempt.upstream.name, attempt.model) for attempt in route.attempts]


@pytest.mark.parametrize("name", FILES)
def test_each_file_of_the_guides_starts_a_gateway(name: str) -> None:
    snapshot = load(name)
    assert snapshot.upstreams
    assert set(snapshot.plans) == {"default", "coding"}


def test_config_toml_leads_the_local_model_to_the_local_server_with_its_key() -> None:
    snapshot = load("config.toml")
    assert attempts(snapshot, "qwen2-7b-local") == [("127.0.0.1:8000", "qwen2-7b-local")]
    local = snapshot.upstreams["127.0.0.1:8000"]
    assert local.api_key == "sk-your-local-vllm-key"
    assert local.url("/chat/completions") == "http://127.0.0.1:8000/v1/chat/completions"
    assert snapshot.models["qwen2-7b-local"].context_window == 8192
    assert snapshot.models["qwen2-7b-local"].display_name == "本地 Qwen2-7B"


def test_taotoken_managed_is_the_section_s_own_address_and_key() -> None:
    snapshot = load("config.toml")
    assert attempts(snapshot, "cloud-fallback") == [("managed", "cloud-fallback")]
    managed = snapshot.upstreams["managed"]
    assert managed.url("/chat/completions") == "https://taotoken.net/api/v1/chat/completions"
    assert managed.api_key == "sk-your-taotoken-key"


def test_config_toml_s_timeout_is_the_longest_silence_and_retries_are_counted() -> None:
    for upstream in load("config.toml").upstreams.values():
        assert (upstream.timeouts.first_token_s, upstream.timeouts.idle_s, upstream.max_retries) == (60.0, 60.0, 2)
        assert upstream.timeouts.total_s == 600.0


def test_default_model_of_config_toml_answers_requests_that_name_none() -> None:
    assert attempts(load("config.toml"), None) == [("127.0.0.1:8000", "qwen2-7b-local")]


def test_changing_the_line_default_model_moves_those_requests(tmp_path: Path) -> None:
    text = (SEEDS / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(
        text.replace('default_model = "qwen2-7b-local"', 'default_model = "cloud-fallback"')
    )
    assert attempts(load_config(tmp_path / "config.toml", {}), None) == [("managed", "cloud-fallback")]


def test_the_sections_headrace_and_taotoken_are_the_same(tmp_path: Path) -> None:
    theirs = tmp_path / "config.toml"
    theirs.write_text((SEEDS / "config.toml").read_text().replace("[taotoken", "[headrace"))
    ours = load_config(theirs, {})
    assert dict(ours.models) == dict(load("config.toml").models)
    assert dict(ours.upstreams) == dict(load("config.toml").upstreams)


def test_managed_takes_address_and_key_of_the_environment_when_the_section_has_none(tmp_path: Path) -> None:
    for word in ("managed", "taotoken-managed"):
        (tmp_path / "config.toml").write_text(f'[models.big]\nupstream = "{word}"\n')
        environment = {"TAOTOKEN_BASE_URL": "https://channel.example/api", "TAOTOKEN_API_KEY": "sk-env"}
        managed = load_config(tmp_path / "config.toml", environment).upstreams["managed"]
        assert (managed.base_url, managed.api_key) == ("https://channel.example/api", "sk-env")
        with pytest.raises(InvalidConfig, match=r"config\.toml:2: models\.big\.upstream .*TAOTOKEN_BASE_URL"):
            load_config(tmp_path / "config.toml", {})


def test_names_match_exactly() -> None:
    with pytest.raises(ApiError, match=r"`qwen2_7b_local` does not exist\. Did you mean `qwen2-7b-local`"):
        attempts(load("config.toml"), "qwen2_7b_local")


def test_settings_json_beside_config_toml_are_its_request_defaults_but_never_stream() -> None:
    written = json.loads((SEEDS / "settings.json").read_text())
    assert written.pop("stream") is True
    assert dict(load("config.toml").presets) == written
    assert dict(load("settings.json").presets) == written
    assert any("/stream" in warning for warning in load("settings.json").warnings)


def test_providers_json_sends_normal_requests_to_the_default_and_falls_back() -> None:
    snapshot = load("providers.json")
    assert attempts(snapshot, "qwen2.5-7b-awq") == [("local-vllm", "qwen2.5-7b-awq"), ("taotoken", "claude-sonnet-4-5")]
    assert attempts(snapshot, None)[0] == ("local-vllm", "qwen2.5-7b-awq")
    assert snapshot.upstreams["local-vllm"].api_key == "EMPTY"


def test_providers_json_leads_models_that_the_default_lacks_to_the_fallback() -> None:
    assert attempts(load("providers.json"), "gpt-4o") == [("taotoken", "gpt-4o")]


@pytest.mark.parametrize(("max_tokens", "first"), [(4096, "local-vllm"), (4097, "taotoken"), (None, "local-vllm")])
def test_the_rule_of_providers_json_compares_max_tokens(max_tokens: int | None, first: str) -> None:
    route = decide(load("providers.json"), RequestFacts(endpoint="chat", model="qwen2.5-7b-awq", max_tokens=max_tokens))
    assert route.attempts[0].upstream.name == first
    assert route.rule == ("routing.rules[0]" if first == "taotoken" else None)


def test_a_variable_of_providers_json_comes_from_the_environment_or_stops_the_start() -> None:
    assert load("providers.json").upstreams["taotoken"].api_key == "sk-from-the-environment"
    with pytest.raises(
        InvalidConfig, match=r"providers\.json /providers/taotoken/api_key: .*TAOTOKEN_API_KEY.*not set"
    ):
        load_config(SEEDS / "providers.json", {})


def test_client_settings_are_an_upstream_with_their_three_pieces() -> None:
    snapshot = load("client.json")
    assert attempts(snapshot, None) == [("imported", "Qwen2.5-72B-Instruct")]
    upstream = snapshot.upstreams["imported"]
    assert (upstream.base_url, upstream.timeouts.idle_s, upstream.max_retries) == ("https://taotoken.net/api", 120.0, 2)
    assert dict(load("cline.json").presets) == {"temperature": 0.7, "max_tokens": 2048}


def test_a_placeholder_that_is_no_key_yet_is_only_a_warning() -> None:
    for name in ("cline.json", "codex-auth.json", "client.json"):
        assert any("placeholder" in warning for warning in load(name).warnings)


def test_the_files_are_what_the_guides_print() -> None:
    assert tomllib.loads((SEEDS / "config.toml").read_text())["taotoken"]["models"]["cloud-fallback"] == {
        "display_name": "云端备用模型",
        "upstream": "taotoken-managed",
        "context_window": 32768,
    }
    assert json.loads((SEEDS / "providers.json").read_text())["routing"]["rules"] == [
        {"match": {"max_tokens": ">4096"}, "target": "taotoken"}
    ]


def test_a_settings_file_next_to_a_providers_json_is_somebody_else_s(tmp_path: Path) -> None:
    shutil.copy(SEEDS / "providers.json", tmp_path)
    (tmp_path / "settings.json").write_text('{"editor.fontSize": 12}')
    assert dict(load_config(tmp_path / "providers.json", ENVIRONMENT).presets) == {}
