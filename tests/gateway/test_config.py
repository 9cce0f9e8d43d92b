"""Our own configuration file: what each part of it means."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.command_line import parse_command_line
from headrace.gateway.config_document import parse_document
from headrace.gateway.config_load import Overrides, is_gateway_config, load_config
from headrace.gateway.snapshot import Limits, Price, Snapshot, Timeouts, Upstream

WHOLE = """
default_model = "small"
strict = true

[server]
host = "0.0.0.0"
port = "${PORT:-9000}"
hold_back_s = 2.5
max_body_bytes = 1_000_000
log_level = "debug"
page_url = "https://keys.example/"
allowed_origins = ["https://app.example"]
retention_days = 90

[upstreams.local]
urls = ["http://10.0.0.1:8000/v1/", "http://10.0.0.2:8000/v1"]
models = ["qwen", "embed"]
timeouts = { connect = 1, first_token = 30, idle = 10.5, total = 900 }
health_path = "/health"
headers = { x-team = "water" }
max_retries = 0

[upstreams.claude]
base_url = "https://api.anthropic.com"
dialect = "anthropic"
api_key = "${CLAUDE_KEY}"
models = ["claude-sonnet-4-5"]

[upstreams.anything]
base_url = "https://gateway.example"
path_prefix = "/v1beta/openai"
fallback_model = "big"

[models.small]
display_name = "Small"
upstream = "local"
upstream_model = "qwen"
aliases = ["gpt-4o-mini", "claude-local"]
context_window = 8192
price = { input = 0.15, output = 0.6, cached_input = 0.075 }
presets = { temperature = 0.1, stop = ["###"] }
fallbacks = ["claude-sonnet-4-5", { upstream = "anything", model = "large", context_window = 200000 }]

[aliases]
sonnet = "claude-sonnet-4-5"

[routing]
default = "local"
fallback = ["anything"]

[[routing.rules]]
match = { key.tag = "private" }
target = "local"

[[routing.rules]]
match = { prompt_tokens = ">= 100_000", "header.x-tier" = ["gold", "plat*"] }
target = "claude"
fallback = ["anything"]

[plans.coding]
rpm = 30

[plans.team]
display_name = "Team"
models = ["qwen*", "small"]
tpm = 100000
concurrency = 4
budget = 12.5
budget_period = "week"
presets = { top_p = 0.5 }
session_affinity = true

[presets]
temperature = 0.7
maxTokens = 100
"""


def load(folder: Path, text: str, environment: dict[str, str] | None = None) -> Snapshot:
    path = folder / "headrace.toml"
    path.write_text(text)
    return load_config(path, environment or {})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return load(tmp_path_factory.mktemp("whole"), WHOLE, {"CLAUDE_KEY": " Bearer sk-claude\n"})


def test_the_whole_file_has_no_warnings_but_for_missing_prices(whole: Snapshot) -> None:
    assert [warning for warning in whole.warnings if "which has no price" not in warning] == []


def test_server_values_are_read_and_others_have_their_defaults(whole: Snapshot) -> None:
    listen = whole.listen
    assert (listen.host, listen.port, listen.hold_back_s, listen.max_body_bytes) == ("0.0.0.0", 9000, 2.5, 1_000_000)
    assert (listen.log_level, listen.page_url, listen.drain_s) == ("debug", "https://keys.example/", 30.0)
    assert listen.retention_days == 90


def test_urls_are_replicas_and_lose_their_last_slash(whole: Snapshot) -> None:
    local = whole.upstreams["local"]
    assert local.base_urls == ("http://10.0.0.1:8000/v1", "http://10.0.0.2:8000/v1")
    assert local.url("/embeddings", replica=1) == "http://10.0.0.2:8000/v1/embeddings"
    assert local.root_url("/health", 1) == "http://10.0.0.2:8000/health"
    assert local.timeouts == Timeouts(connect_s=1.0, first_token_s=30.0, idle_s=10.5, total_s=900.0)
    assert local.headers == (("x-team", "water"),)
    assert local.max_retries == 0


def test_a_key_loses_the_blanks_and_the_bearer_that_were_copied_with_it(whole: Snapshot) -> None:
    assert whole.upstreams["claude"].api_key == "sk-claude"


@pytest.mark.parametrize(
    ("upstream", "path", "url"),
    [
        (Upstream(name="u", base_url="http://h:8000/v1"), "/chat/completions", "http://h:8000/v1/chat/completions"),
        (Upstream(name="u", base_url="http://h:8000"), "/chat/completions", "http://h:8000/v1/chat/completions"),
        (Upstream(name="u", base_url="https://h/api"), "/models", "https://h/api/v1/models"),
        (Upstream(name="u", base_url="https://h/v1beta/openai"), "/embeddings", "https://h/v1beta/openai/embeddings"),
        (Upstream(name="u", base_url="https://h/api/v3"), "/chat/completions", "https://h/api/v3/chat/completions"),
        (Upstream(name="u", base_url="https://h/openai"), "/models", "https://h/openai/models"),
        (Upstream(name="u", base_url="https://h/x", path_prefix="v9/"), "/models", "https://h/v9/models"),
        (Upstream(name="u", base_url="https://h/x", path_prefix=""), "/models", "https://h/models"),
        (Upstream(name="u", base_url="https://h/v1", chat_path="/go"), "/chat/completions", "https://h/go"),
        (Upstream(name="u", base_url="https://h/v1", chat_path="/go"), "/models", "https://h/v1/models"),
        (Upstream(name="u", base_url="https://h/anthropic"), "/messages", "https://h/anthropic/v1/messages"),
        (Upstream(name="u", base_url="http://h:8000/v1"), "/tokenize", "http://h:8000/tokenize"),
        (Upstream(name="u", base_url="http://h:8000/api"), "/pooling", "http://h:8000/api/pooling"),
        (Upstream(name="u", base_url="http://h/x", path_prefix="/v1"), "/detokenize", "http://h/v1/detokenize"),
    ],
)
def test_paths_join_base_urls(upstream: Upstream, path: str, url: str) -> None:
    assert upstream.url(path) == url


def test_an_endpoint_s_address_is_taken_as_its_base_with_a_warning(tmp_path: Path) -> None:
    snapshot = load(tmp_path, '[upstreams.u]\nbase_url = "http://h:8000/v1/chat/completions/"\n')
    assert snapshot.upstreams["u"].url("/chat/completions") == "http://h:8000/v1/chat/completions"
    assert "which is an endpoint" in snapshot.warnings[0]


def test_a_model_has_its_target_then_its_fallbacks(whole: Snapshot) -> None:
    small = whole.models["small"]
    assert [(t.upstream, t.model, t.context_window) for t in small.targets] == [
        ("local", "qwen", 8192),
        ("claude", "claude-sonnet-4-5", None),
        ("anything", "large", 200_000),
    ]
    assert small.presets == {"temperature": 0.1, "stop": ["###"]}


def test_prices_are_exact_micro_units_of_a_million_tokens(whole: Snapshot) -> None:
    price = Price(input_micros_per_mtok=150_000, output_micros_per_mtok=600_000, cached_input_micros_per_mtok=75_000)
    assert whole.models["small"].price == whole.models["small"].targets[0].price == price


def test_models_are_those_described_and_those_that_upstreams_list(whole: Snapshot) -> None:
    assert list(whole.models) == ["small", "qwen", "embed", "claude-sonnet-4-5"]
    assert dict(whole.aliases) == {
        "gpt-4o-mini": "small",
        "claude-local": "small",
        "sonnet": "claude-sonnet-4-5",
    }


def test_a_model_that_two_upstreams_list_has_both_targets_the_default_first(tmp_path: Path) -> None:
    text = (
        '[upstreams.a]\nbase_url = "http://a"\nmodels = ["m"]\n[upstreams.b]\nbase_url = "http://b"\nmodels = ["m"]\n'
    )
    snapshot = load(tmp_path, text + '[routing]\ndefault = "b"\n')
    assert [target.upstream for target in snapshot.models["m"].targets] == ["b", "a"]


def test_plans_ship_and_can_be_changed_and_added(whole: Snapshot) -> None:
    coding, team = whole.plans["coding"], whole.plans["team"]
    assert coding.presets == {"temperature": 0.2, "top_p": 0.95}
    assert coding.session_affinity
    assert coding.limits == Limits(rpm=30, concurrency=16)
    assert team.limits == Limits(tpm=100_000, concurrency=4, budget_micros=12_500_000, budget_period="week")
    assert (team.models, team.presets, team.session_affinity) == (("qwen*", "small"), {"top_p": 0.5}, True)
    assert whole.plans["default"].limits == Limits()


def test_request_defaults_may_be_spelled_as_clients_spell_them(whole: Snapshot) -> None:
    assert whole.presets == {"temperature": 0.7, "max_tokens": 100}


def test_fields_beyond_openai_s_are_for_servers_that_take_them(whole: Snapshot) -> None:
    assert {name: u.extended_sampling for name, u in whole.upstreams.items()} == {
        "local": True,
        "claude": False,
        "anything": True,
    }


def test_fallback_may_name_a_model(tmp_path: Path) -> None:
    text = '[upstreams.a]\nbase_url = "http://a"\nmodels = ["m"]\n[models.spare]\nupstream = "http://b:1/v1"\n'
    snapshot = load(tmp_path, text + '[routing]\nfallback = "spare"\n')
    assert snapshot.fallback == ("b:1",)
    assert snapshot.fallback_models == {"b:1": "spare"}


def test_two_models_of_one_address_and_key_share_an_upstream(tmp_path: Path) -> None:
    text = "".join(f'[models.{n}]\nupstream = "http://h:1/v1"\nupstream_key = "{k}"\n' for n, k in ["ak", "bk", "cz"])
    snapshot = load(tmp_path, text)
    assert {name: (u.models, u.api_key) for name, u in snapshot.upstreams.items()} == {
        "h:1": (("a", "b"), "k"),
        "h:1-2": (("c",), "z"),
    }


def test_an_engine_section_is_an_upstream_and_words_for_serve(tmp_path: Path) -> None:
    text = """
[engine.qwen]
model = "Qwen/Qwen2.5-0.5B-Instruct"
served_model_name = ["qwen", "qwen-0.5b"]
max_model_len = 4096
gpu_memory_utilization = 0.5
enable_prefix_caching = false
hf_overrides = { rope_theta = 1.5 }
api_key = "${KEY}"
[engine.small]
host = "0.0.0.0"
"""
    snapshot = load(tmp_path, text, {"KEY": "sk-engine"})
    qwen, small = snapshot.upstreams["qwen"], snapshot.upstreams["small"]
    assert (qwen.base_url, qwen.api_key, qwen.models) == (
        "http://127.0.0.1:8000/v1",
        "sk-engine",
        ("qwen", "qwen-0.5b"),
    )
    assert (small.base_url, small.models, small.health_path) == (
        "http://127.0.0.1:8001/v1",
        ("smollm2-135m-instruct",),
        "/health",
    )
    given = parse_command_line(snapshot.engines[0].flags)
    assert given.errors == []
    assert given.values == {
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "served-model-name": ("qwen", "qwen-0.5b"),
        "max-model-len": 4096,
        "gpu-memory-utilization": 0.5,
        "enable-prefix-caching": False,
        "hf-overrides": {"rope_theta": 1.5},
        "api-key": ("sk-engine",),
        "port": 8000,
    }
    assert [spec.name for spec in snapshot.engines] == ["qwen", "small"]


def test_a_headrace_toml_is_told_from_a_file_of_serve_flags(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[engine.x]\n")
    (tmp_path / "b.toml").write_text("max-model-len = 8192\n")
    (tmp_path / "c.yaml").write_text("max-model-len: 8192\n")
    assert [is_gateway_config(tmp_path / name) for name in ("a.toml", "b.toml", "c.yaml")] == [True, False, False]


def test_without_a_file_the_engine_on_this_machine_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snapshot = load_config(None, {})
    assert snapshot.upstreams["engine"].base_url == "http://127.0.0.1:8000/v1"
    assert (snapshot.default_upstream, snapshot.fallback) == ("engine", ())
    (tmp_path / "headrace.toml").write_text('[upstreams.x]\nbase_url = "http://h"\n')
    assert list(load_config(None, {}).upstreams) == ["x"]


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "g.toml").write_text('[upstreams.u]\nbase_url = "http://h"\n[server]\nport = 1\nhost = "0.0.0.0"\n')
    listen = load_config(tmp_path / "g.toml", {}, overrides=Overrides(port=2, log_level="error")).listen
    assert (listen.host, listen.port, listen.log_level) == ("0.0.0.0", 2, "error")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${A}", "one"),
        ("x-${A}-${A}", "x-one-one"),
        ("${NONE:-two}", "two"),
        ("${BLANK:-two}", "two"),
        ("${A:-two}", "one"),
        ("${NONE:-}x", "x"),
        ("$${A}", "${A}"),
        ("$A", "$A"),
        ("${file:secret}", "from a file"),
    ],
)
def test_placeholders(tmp_path: Path, text: str, value: str) -> None:
    (tmp_path / "secret").write_text("from a file\n")
    toml = f'[upstreams.u]\nbase_url = "http://h"\nheaders = {{ a = "{text}" }}\n'
    snapshot = load(tmp_path, toml, {"A": "one", "BLANK": ""})
    assert snapshot.upstreams["u"].headers == (("a", value),)


def test_files_that_were_read_are_the_snapshot_s_sources(tmp_path: Path) -> None:
    (tmp_path / "k").write_text("sk-1")
    (tmp_path / "s.json").write_text('{"top_k": 5}')
    text = 'settings = "s.json"\n[upstreams.u]\nbase_url = "http://h"\napi_key = "${file:k}"\n'
    snapshot = load(tmp_path, text)
    assert [Path(name).name for name in snapshot.sources] == ["headrace.toml", "s.json", "k"]
    assert snapshot.presets == {"top_k": 5}


def test_lines_of_toml_are_found_in_every_form() -> None:
    text = (
        "# comment [x]\n[a.'b.c']\nk = '''\nz = 1\n'''\nlist = [\n  1, # ]\n  2,\n]\n\"q\\u0061\".w = { v = 1 }\n"
        "[[t]]\nm = 1\n[t.n]\no = 1\n[[t]]\n[t.n]\no = 1\n[[t.u]]\n[[t.u]]\ni = 1\n"
    )
    document = parse_document(text, Path("x.toml"))
    places = {
        ("a", "b.c", "k"): 3,
        ("a", "b.c", "list", 1): 6,
        ("a", "b.c", "qa", "w", "v"): 10,
        ("t", 0, "m"): 12,
        ("t", 0, "n", "o"): 14,
        ("t", 1, "n", "o"): 17,
        ("t", 1, "u", 1, "i"): 20,
    }
    assert {key: document.place(key) for key in places} == {key: f"x.toml:{line}" for key, line in places.items()}
