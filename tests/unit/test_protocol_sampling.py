"""Sampling fields: ranges, defaults and their order, limits of the context, fields that are not built."""

from __future__ import annotations

import itertools

import pytest

from headrace.protocol.errors import ApiError
from headrace.protocol.generation_defaults import default_sampling
from headrace.protocol.ipc import SamplingParams
from headrace.protocol.sampling import (
    ModelLimits,
    SamplingFields,
    StreamOptions,
    sampling_params,
    text_rules,
)
from headrace.protocol.unbuilt_fields import UNBUILT, unknown_fields

SEEDS = itertools.count(4711)
LIMITS = ModelLimits(max_model_len=100, vocab_size=1000, eos_token_ids=(2,))


def params(defaults: dict[str, float] | None = None, *, prompt_tokens: int = 10, **fields: object) -> SamplingParams:
    sent = SamplingFields(**fields)  # type: ignore[arg-type]
    return sampling_params(
        sent,
        defaults or {},
        LIMITS,
        prompt_tokens=prompt_tokens,
        where="messages",
        max_tokens=sent.max_tokens,
        fresh_seed=SEEDS.__next__,
    )


def refusal(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        params(**fields)  # type: ignore[arg-type]
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "between 0 and 100"),
        ("temperature", 101, "between 0 and 100"),
        ("top_p", 1.01, "between 0 and 1"),
        ("top_p", float("nan"), "between 0 and 1"),
        ("top_k", -2, "-1 or 0 (off)"),
        ("top_k", 10**400, "-1 or 0 (off)"),
        ("min_p", -0.5, "between 0 and 1"),
        ("repetition_penalty", 0, "more than 0"),
        ("presence_penalty", 2.5, "between -2 and 2"),
        ("frequency_penalty", -3, "between -2 and 2"),
        ("n", 0, "between 1 and 128"),
        ("n", 129, "between 1 and 128"),
        ("seed", 2**64, "between -2^63"),
        ("max_tokens", 0, "1 or more"),
        ("min_tokens", -1, "between 0 and"),
        ("priority", 2**40, "between -2^31"),
    ],
)
def test_a_value_out_of_range_is_refused_with_value_and_range(name: str, value: float, allowed: str) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert allowed in error.message
    if abs(value) < 1e30:
        assert str(value) in error.message


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert "limit of 5 tokens" in refusal(max_tokens=5, min_tokens=6).message


@pytest.mark.parametrize("off", [-1, 0, None, 1000, 5000])
def test_top_k_minus_one_zero_and_the_whole_vocabulary_are_off(off: int | None) -> None:
    assert params(top_k=off).top_k == 0


def test_top_p_zero_leaves_only_the_best_token() -> None:
    chosen = params(top_p=0)
    assert (chosen.top_p, chosen.top_k) == (1.0, 1)


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert params(temperature=1e-6).temperature == 0.0


def test_a_request_wins_over_the_defaults_and_null_does_not() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 40.0, "repetition_penalty": 1.1}
    chosen = params(defaults, temperature=0.2, top_p=None)
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.repetition_penalty) == (0.2, 0.9, 40, 1.1)


def test_without_any_defaults_nothing_changes_the_distribution() -> None:
    chosen = params()
    neutral = SamplingParams(max_tokens=90, stop_token_ids=(2,), seed=chosen.seed)
    assert chosen == neutral


def test_a_missing_seed_is_drawn_anew_and_a_given_one_is_kept() -> None:
    assert params().seed != params().seed
    assert params(seed=42).seed == 42
    assert 0 <= params(seed=-1).seed < 2**63


def test_max_tokens_defaults_to_what_fits_or_the_generation_config() -> None:
    assert params().max_tokens == 90
    assert params({"max_new_tokens": 20}).max_tokens == 20
    assert params({"max_new_tokens": 20}, max_tokens=50).max_tokens == 50


def test_too_many_tokens_are_refused_with_all_the_numbers() -> None:
    error = refusal(max_tokens=95)
    assert error.code == "context_length_exceeded"
    for number in (
        "maximum context length is 100 tokens",
        "105 tokens",
        "10 in the messages",
        "95",
        "`max_tokens` to 90",
    ):
        assert number in error.message


def test_a_prompt_that_leaves_no_room_is_refused_with_how_much_to_cut() -> None:
    error = refusal(prompt_tokens=100)
    assert error.code == "context_length_exceeded"
    assert "by 1 tokens or more" in error.message


def test_end_of_sequence_ends_unless_ignored() -> None:
    assert params(stop_token_ids=[7, 2]).stop_token_ids == (2, 7)
    assert params(stop_token_ids=[7], ignore_eos=True).stop_token_ids == (7,)


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": [1000]}, {"logit_bias": {-1: 1.0}}, {"stop_token_ids": [10**30]}]
)
def test_token_ids_outside_the_vocabulary_are_refused(fields: dict[str, object]) -> None:
    assert "vocabulary is 0 to 999" in refusal(**fields).message


def test_a_logit_bias_out_of_range_names_the_token() -> None:
    assert refusal(logit_bias={5: 101.0}).param == "logit_bias.5"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ApiError, match="empty string"):
        text_rules(SamplingFields(stop=["a", ""]))


def test_defaults_come_from_the_model_then_the_override() -> None:
    own = {"temperature": 0.6, "top_p": None, "do_sample": True, "eos_token_id": 2, "max_new_tokens": 64}
    assert default_sampling(own, "auto", {}) == {"temperature": 0.6, "max_new_tokens": 64}
    assert default_sampling(own, "auto", {"temperature": 0.1}) == {"temperature": 0.1, "max_new_tokens": 64}
    assert default_sampling(own, "none", {"top_k": 5}) == {"top_k": 5}


@pytest.mark.parametrize(
    ("default", "said"),
    [
        ({"temperature": 900}, "between 0 and 100, but it is 900"),
        ({"top_p": -0.1}, "between 0 and 1"),
        ({"top_k": -5}, "-1 or 0"),
        ({"repetition_penalty": 0}, "more than 0"),
        ({"max_new_tokens": 0}, "1 or more"),
        ({"min_p": float("nan")}, "between 0 and 1"),
    ],
)
def test_a_default_that_no_request_could_send_is_refused(default: dict[str, object], said: str) -> None:
    for own, override in ((default, {}), ({}, default)):
        with pytest.raises(ValueError, match=said):
            default_sampling(own, "auto", override)


def test_an_override_without_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="num_beams"):
        default_sampling({}, "auto", {"num_beams": 4})


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []},
        {"tools": None},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"parallel_tool_calls": True},
        {"use_beam_search": False},
        {"suffix": None},
        {"length_penalty": 1.0},
        {"cache_prompt": True},
        {"service_tier": "auto"},
        {"mirostat": 0, "mirostat_tau": 5.0},
        {"guided_decoding_backend": "outlines"},
    ],
)
def test_fields_that_ask_for_nothing_pass(harmless: dict[str, object]) -> None:
    assert unknown_fields(harmless) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("web_search_options", {}),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("cache_prompt", False),
        ("include_reasoning", False),
        ("logits_processors", ["f"]),
        ("suffix", "end"),
        ("mirostat", 2),
    ],
)
def test_a_known_field_that_is_not_built_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        unknown_fields({field: value})
    assert caught.value.param == field
    assert caught.value.message.startswith(f"`{field}` is not supported yet by this server.")


def test_a_field_that_nobody_knows_is_reported() -> None:
    assert unknown_fields({"temprature": 0.5, "tools": None}) == ["temprature"]


def test_no_field_is_both_built_and_not_built() -> None:
    built = set(SamplingFields.__struct_fields__) | set(StreamOptions.__struct_fields__)
    assert not built & set(UNBUILT)
