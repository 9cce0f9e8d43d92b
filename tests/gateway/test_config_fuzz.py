"""Whatever stands in a file, loading it ends in a snapshot or in complaints; nothing else comes out."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.gateway.config_load import InvalidConfig, load_config
from headrace.gateway.route import RequestFacts, decide
from headrace.gateway.snapshot import Snapshot
from headrace.protocol.errors import ApiError

UPSTREAM_KEYS = (
    "base_url urls api_key dialect models timeout timeouts headers path_prefix chat_path health_path max_retries "
    "fallback_model extended_sampling"
).split()
MODEL_KEYS = (
    "display_name upstream upstream_key upstream_model targets fallbacks aliases context_window price presets"
).split()

scalars = st.one_of(
    st.sampled_from(
        ["a", "b", "m", "n", "managed", "http://h:1/v1", "https://h/api", "${A}", "${B:-x}", ">4", "", "*"]
    ),
    st.integers(-2, 2),
    st.sampled_from([8192, 10**30, 0.5, -1.5, True, False, None]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["upstream", "model", "a", "input", "temperature", "connect"]), inner, max_size=3
        ),
    ),
    max_leaves=5,
)


def tables(keys: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(keys), anything, max_size=4)


def named(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(["a", "b", "m"]), inner, max_size=2)


good_upstream = st.fixed_dictionaries(
    {"base_url": st.just("http://h:1/v1")}, optional={"models": st.lists(st.sampled_from(["m", "n"]), max_size=2)}
)
rule = st.fixed_dictionaries(
    {},
    optional={
        "match": st.dictionaries(st.sampled_from(["max_tokens", "model", "stream", "key", "x"]), anything, max_size=2),
        "target": scalars,
        "model": scalars,
        "fallback": anything,
    },
)
files = st.fixed_dictionaries(
    {},
    optional={
        "strict": anything,
        "default_model": scalars,
        "upstreams": anything | named(tables(UPSTREAM_KEYS) | good_upstream),
        "providers": named(good_upstream),
        "models": anything | named(tables(MODEL_KEYS)),
        "headrace": anything | tables([*UPSTREAM_KEYS, "default_model"]),
        "aliases": anything | st.dictionaries(st.sampled_from(["a", "b", "m", "z"]), scalars, max_size=2),
        "routing": anything
        | st.fixed_dictionaries(
            {}, optional={"default": scalars, "fallback": anything, "rules": st.lists(rule, max_size=2) | anything}
        ),
        "plans": anything | named(tables(["rpm", "tpm", "budget", "budget_period", "models", "presets"])),
        "presets": anything,
        "settings": anything,
        "server": anything | tables(["host", "port", "admin", "hold_back_s", "database", "log_level"]),
        "engine": anything | named(tables(["model", "port", "host", "api_key", "max_model_len", "hf_overrides", "x"])),
        "base_url": scalars,
        "openai": anything,
        "temperature": anything,
    },
)


places = st.sampled_from(["a", "b", "m", "n", "x"])
plausible_rule = st.fixed_dictionaries(
    {
        "match": st.dictionaries(st.sampled_from(["max_tokens", "tools"]), st.sampled_from([">4", 5]), max_size=2)
        | st.fixed_dictionaries({"model": st.sampled_from(["m", "n", "*", "x"])}),
        "target": places,
    },
    optional={"fallback": st.lists(places, max_size=2)},
)
plausible_model = st.fixed_dictionaries(
    {"upstream": st.sampled_from(["a", "b", "http://other:2/v1"])},
    optional={
        "upstream_model": st.sampled_from(["m", "n"]),
        "fallbacks": st.lists(places | st.just("managed"), max_size=2),
        "context_window": st.sampled_from([4, 8192]),
        "aliases": st.lists(st.sampled_from(["z", "zz"]), max_size=2),
    },
)
plausible = st.fixed_dictionaries(
    {"upstreams": st.fixed_dictionaries({"a": good_upstream, "b": good_upstream})},
    optional={
        "models": st.fixed_dictionaries({"x": plausible_model}),
        "default_model": places,
        "routing": st.fixed_dictionaries(
            {},
            optional={
                "default": places,
                "fallback": st.lists(places, max_size=2),
                "rules": st.lists(plausible_rule, max_size=2),
            },
        ),
    },
)


def load(path: Path) -> Snapshot | tuple[str, ...]:
    """The snapshot, or the complaints."""
    try:
        return load_config(path, {"A": "x"})
    except InvalidConfig as error:
        return error.problems


def status(snapshot: Snapshot, model: str | None) -> int:
    """200 when there is somebody to ask."""
    try:
        return 200 if decide(snapshot, RequestFacts(endpoint="chat", model=model, max_tokens=5)).attempts else 500
    except ApiError as error:
        return error.status


@settings(max_examples=300, deadline=None)
@given(files | plausible)
@example({"upstreams": {"a": {"base_url": "http://h:1", "models": "m"}}, "routing": {"default": "a", "fallback": "a"}})
@example({"models": {"m": {"upstream": "http://h:1/v1", "fallbacks": ["m", "managed", 3, {"upstream": "zzz"}]}}})
def test_a_file_is_a_snapshot_or_complaints(content: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "g.json"
        path.write_text(json.dumps(content))
        found = load(path)
    if not isinstance(found, Snapshot):
        assert found
        assert all(problem.startswith(folder) for problem in found)
        return
    assert found.upstreams
    for model in found.models.values():
        assert model.targets
        assert all(target.upstream in found.upstreams for target in model.targets)
    if not found.rules:
        assert {status(found, name) for name in [*found.models, *found.aliases]} <= {200}
    assert status(found, None) in (200, 400, 404)
    assert found.default_model is None or status(found, None) in (200, 404 if found.rules else 200)
    assert status(found, "unknown") in (200, 404)


toml_text = st.text("[]{}=.,#\"'\\\n ab1_-", max_size=60)


@settings(max_examples=200, deadline=None)
@given(toml_text)
def test_any_text_is_read_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "g.toml"
        path.write_text(text)
        found = load(path)
    assert not isinstance(found, Snapshot)
    assert all(problem.startswith(folder) for problem in found)
