"""Request defaults: absent sampling fields are filled in order, and nothing else of a request changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.presets import FIELDS, SAME_FIELD, apply_presets


def fields(**values: Any) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(msgspec.json.encode(values), type=dict[str, msgspec.Raw])


def filled(request: dict[str, Any], *layers: dict[str, Any], endpoint: str = "chat", **more: Any) -> dict[str, Any]:
    return msgspec.json.decode(
        msgspec.json.encode(apply_presets(fields(**request), *layers, endpoint=endpoint, **more))
    )


def test_the_request_wins_then_the_plan_then_the_model_then_settings_json() -> None:
    plan, model, settings = {"top_p": 0.2}, {"top_p": 0.3, "seed": 3}, {"top_p": 0.4, "seed": 4, "temperature": 0.4}
    assert filled({"temperature": 0.1}, plan, model, settings) == {"temperature": 0.1, "top_p": 0.2, "seed": 3}


def test_null_counts_as_absent_and_zero_does_not() -> None:
    assert filled({"seed": None, "temperature": 0}, {"seed": 5, "temperature": 1.0}) == {"seed": 5, "temperature": 0}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_max_tokens_under_another_name_is_not_absent(name: str) -> None:
    assert filled({name: 7}, {"max_tokens": 100}) == {name: 7}


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("chat", {"max_tokens": 9, "stop": "x", "seed": 1, "top_k": 2}),
        ("completions", {"max_tokens": 9, "stop": "x", "seed": 1, "top_k": 2}),
        ("messages", {"max_tokens": 9, "stop_sequences": ["x"], "top_k": 2}),
        ("responses", {"max_output_tokens": 9}),
        ("embeddings", {}),
        ("rerank", {}),
    ],
)
def test_each_endpoint_has_its_own_names(endpoint: str, expected: dict[str, Any]) -> None:
    presets = {"max_tokens": 9, "stop": "x", "seed": 1, "top_k": 2}
    assert filled({}, presets, endpoint=endpoint) == expected


def test_a_strict_upstream_gets_no_field_that_it_would_refuse() -> None:
    presets = {"temperature": 0.5, "repetition_penalty": 1.05, "min_p": 0.1}
    assert filled({"top_k": 4}, presets, extended=False) == {"top_k": 4, "temperature": 0.5}


def test_temperature_and_top_p_together_are_spared_to_those_who_refuse_them() -> None:
    presets = {"top_p": 0.9, "temperature": 0.7}
    assert filled({}, presets, one_of_temperature_and_top_p=True) == {"temperature": 0.7}
    assert filled({"temperature": 1}, presets, one_of_temperature_and_top_p=True) == {"temperature": 1}
    assert filled({}, {"top_p": 0.9}, one_of_temperature_and_top_p=True) == {"top_p": 0.9}


def test_a_preset_max_tokens_that_may_not_fit_is_left_out() -> None:
    assert filled({}, {"max_tokens": 2048}, room_tokens=2048) == {"max_tokens": 2048}
    assert filled({}, {"max_tokens": 2048}, room_tokens=2047) == {}


def test_a_request_that_needs_nothing_is_the_same_object() -> None:
    request = fields(model="m", temperature=1)
    assert apply_presets(request, {"temperature": 0.5}, endpoint="chat") is request
    assert apply_presets(request, endpoint="chat") is request


json_values = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | st.lists(st.integers(), max_size=2)


@given(
    st.dictionaries(st.sampled_from([*FIELDS, *SAME_FIELD, "model", "stream", "messages", "x"]), json_values),
    st.dictionaries(st.sampled_from(list(FIELDS)), st.integers(1, 9)),
    st.sampled_from(["chat", "completions", "messages", "responses", "embeddings"]),
)
def test_what_a_request_says_is_never_changed(request: dict[str, Any], presets: dict[str, Any], endpoint: str) -> None:
    after = filled(request, presets, endpoint=endpoint)
    assert {name: after[name] for name, value in request.items() if value is not None} == {
        name: value for name, value in request.items() if value is not None
    }
    assert after.get("stream") == request.get("stream")
    assert set(after) - set(request) <= {*presets, "stop_sequences", "max_output_tokens"}
