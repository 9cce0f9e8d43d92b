"""The rule language: what holds, what does not, and that the first rule wins."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.rules import RequestFacts, holds, matching_rule, parse_condition, parse_match
from headrace.gateway.snapshot import Comparison, Condition, Rule

COMPARE = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
counts = st.integers(0, 10_000)
optional_counts = st.none() | counts


def facts(**values: Any) -> RequestFacts:
    return RequestFacts(**{"endpoint": "chat", **values})


def matches(match: dict[str, Any], request: RequestFacts, model: str | None = None) -> bool:
    rule = Rule(match=parse_match(match), target="t")
    return matching_rule((rule,), request, model or request.model) is rule


def test_the_guides_comparison_is_a_condition() -> None:
    expected = Condition(subject="max_tokens", tests=(Comparison(">", 4096),))
    for written in (">4096", "> 4096", " >4_096 "):
        assert parse_condition("max_tokens", written) == expected
    assert parse_condition("max_completion_tokens", ">4096") == expected


@given(st.sampled_from(list(COMPARE)), counts, optional_counts, st.sampled_from(["", " ", "  "]))
def test_a_comparison_holds_as_arithmetic_says_and_never_for_a_missing_value(
    sign: str, limit: int, value: int | None, blank: str
) -> None:
    expected = value is not None and COMPARE[sign](value, limit)
    assert matches({"max_tokens": f"{blank}{sign}{blank}{limit}{blank}"}, facts(max_tokens=value)) is expected


@given(counts, counts, optional_counts)
def test_total_tokens_are_the_prompt_and_what_is_asked_for(limit: int, prompt: int, asked: int | None) -> None:
    request = facts(prompt_tokens=prompt, max_tokens=asked)
    assert matches({"total_tokens": f">{limit}"}, request) is (prompt + (asked or 0) > limit)
    assert matches({"prompt_tokens": limit}, request) is (prompt == limit)


@given(st.lists(counts, min_size=1, max_size=4), optional_counts)
def test_a_list_means_any_of(values: list[int], value: int | None) -> None:
    assert matches({"max_tokens": values}, facts(max_tokens=value)) is (value in values)


names = st.text("ab-.", min_size=1, max_size=4)


@given(names, names)
def test_a_name_matches_exactly_case_and_hyphens_counting(wanted: str, name: str) -> None:
    assert matches({"model": wanted}, facts(model=name)) is (wanted == name)
    assert matches({"model": wanted.upper()}, facts(model=wanted)) is (wanted.upper() == wanted)


@given(names, names)
def test_a_glob_of_a_prefix_matches_what_begins_with_it(prefix: str, name: str) -> None:
    assert matches({"model": prefix + "*"}, facts(model=name)) is name.startswith(prefix)


@pytest.mark.parametrize(
    ("match", "values", "expected"),
    [
        ({"model": ["gpt-*", "o3"]}, {"model": "o3"}, True),
        ({"model": ["gpt-*", "o3"]}, {"model": "o3-mini"}, False),
        ({"model": "org/*"}, {"model": "org/a/b"}, True),
        ({"model": "*"}, {"model": None}, False),
        ({"stream": True}, {"stream": True}, True),
        ({"stream": False}, {"stream": True}, False),
        ({"tools": True}, {"num_tools": 3}, True),
        ({"tools": True}, {"num_tools": 0}, False),
        ({"tools": False}, {"num_tools": 0}, True),
        ({"tools": ">=2"}, {"num_tools": 1}, False),
        ({"tools": 1}, {"num_tools": 1}, True),
        ({"endpoint": ["embeddings", "rerank"]}, {"endpoint": "rerank"}, True),
        ({"key.tag": "private"}, {"key_tags": ("dev", "private")}, True),
        ({"key.tag": "private"}, {"key_tags": ()}, False),
        ({"key": {"tag": "private", "name": "ci-*"}}, {"key_tags": ("private",), "key_name": "ci-7"}, True),
        ({"key.name": "*"}, {"key_name": ""}, False),
        ({"header.X-Tier": "gold"}, {"headers": {"x-tier": "gold"}}, True),
        ({"header": {"x-tier": ["gold", "plat*"]}}, {"headers": {"x-tier": "platinum"}}, True),
        ({"header.x-tier": "*"}, {"headers": {}}, False),
        ({}, {}, True),
        ({"stream": True, "max_tokens": ">10"}, {"stream": True, "max_tokens": 10}, False),
        ({"max_tokens": ">1.5"}, {"max_tokens": 2}, True),
        ({"max_tokens": 0}, {"max_tokens": 0}, True),
    ],
)
def test_conditions(match: dict[str, Any], values: dict[str, Any], expected: bool) -> None:
    assert matches(match, facts(**values)) is expected


def test_a_rule_may_name_the_model_or_the_alias_that_was_asked_for() -> None:
    for name in ("fast", "qwen2-7b"):
        assert matches({"model": name}, facts(model="fast"), model="qwen2-7b")


@given(st.lists(st.booleans(), max_size=6))
def test_the_first_rule_that_holds_decides(holding: list[bool]) -> None:
    rules = tuple(
        Rule(match=parse_match({"stream": hold}), target=str(place), place=str(place))
        for place, hold in enumerate(holding)
    )
    found = matching_rule(rules, facts(stream=True), None)
    assert (found.target if found else None) == (str(holding.index(True)) if True in holding else None)


conditions = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.one_of(counts, st.builds("{}{}".format, st.sampled_from(list(COMPARE)), counts)),
        "stream": st.booleans(),
        "model": names,
        "tools": st.booleans(),
        "key.tag": names,
    },
)
requests = st.builds(
    RequestFacts,
    endpoint=st.just("chat"),
    model=names,
    max_tokens=optional_counts,
    stream=st.booleans(),
    num_tools=st.integers(0, 2),
    key_tags=st.lists(names, max_size=2).map(tuple),
)


@given(conditions, requests)
def test_all_lines_of_a_match_must_hold(match: dict[str, Any], request: RequestFacts) -> None:
    alone = [holds(condition, request, request.model) for condition in parse_match(match)]
    assert matches(match, request) is all(alone)


@pytest.mark.parametrize(
    ("subject", "value", "says"),
    [
        ("max_token", 1, "Did you mean max_tokens?"),
        ("max_tokens", "4096", "a comparison such as '>4096'"),
        ("max_tokens", "> four", "it is '> four'"),
        ("max_tokens", True, "it is True"),
        ("max_tokens", [">1", {}], "it is {}"),
        ("model", 3, "a glob such as 'gpt-*'"),
        ("model", "", "a name"),
        ("stream", "true", "true or false"),
        ("key.tags", "x", "Did you mean key.tag?"),
        ("header.", "x", "It can look at"),
    ],
)
def test_what_is_no_condition_says_what_one_is(subject: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_condition(subject, value)
    assert says in str(caught.value)
