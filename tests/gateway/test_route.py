"""Where requests go: names, aliases, defaults, rules, fallbacks and contexts; and the token estimate behind it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.estimate import estimate_tokens
from headrace.gateway.route import RequestFacts, Route, decide, model_names
from headrace.gateway.rules import parse_match
from headrace.gateway.snapshot import Model, Price, Rule, Snapshot, Target, Upstream
from headrace.protocol.errors import ApiError

LOCAL = Upstream(name="local", base_url="http://local/v1", models=("qwen", "embed"))
CLOUD = Upstream(name="cloud", base_url="https://cloud/api", models=("claude", "gpt"))
OPEN = Upstream(name="open", base_url="https://open/v1")
CHEAP, DEAR = Price(input_micros_per_mtok=1), Price(input_micros_per_mtok=9)
SNAPSHOT = Snapshot(
    upstreams={"local": LOCAL, "cloud": CLOUD, "open": OPEN},
    models={
        "qwen": Model(name="qwen", targets=(Target(upstream="local", model="qwen", context_window=100, price=CHEAP),)),
        "embed": Model(name="embed", targets=(Target(upstream="local", model="embed", context_window=50),)),
        "claude": Model(
            name="claude", targets=(Target(upstream="cloud", model="claude", context_window=1000, price=DEAR),)
        ),
        "gpt": Model(name="gpt", targets=(Target(upstream="cloud", model="gpt"),)),
    },
    aliases={"fast": "qwen"},
    fallback=("cloud",),
)


def route(snapshot: Snapshot = SNAPSHOT, **facts: Any) -> Route:
    return decide(snapshot, RequestFacts(**{"endpoint": "chat", **facts}))


def places(snapshot: Snapshot = SNAPSHOT, **facts: Any) -> list[tuple[str, str]]:
    return [(attempt.upstream.name, attempt.model) for attempt in route(snapshot, **facts).attempts]


def with_rule(match: dict[str, Any], target: str, **more: Any) -> Snapshot:
    return replace(SNAPSHOT, rules=(Rule(match=parse_match(match), target=target, place="rules[0]", **more),))


def test_a_model_goes_to_its_target_and_then_to_the_fallback_s_first_model() -> None:
    assert places(model="qwen") == [("local", "qwen"), ("cloud", "claude")]


def test_a_fallback_that_has_the_model_itself_is_asked_for_it() -> None:
    assert places(replace(SNAPSHOT, fallback=("cloud", "local")), model="gpt") == [("cloud", "gpt"), ("local", "qwen")]


def test_a_fallback_model_that_is_named_is_taken() -> None:
    assert places(replace(SNAPSHOT, fallback_models={"cloud": "gpt"}), model="qwen")[1] == ("cloud", "gpt")


def test_an_embedding_is_never_answered_by_another_model() -> None:
    assert places(model="embed", endpoint="embeddings") == [("local", "embed")]


def test_an_alias_is_its_model() -> None:
    assert places(model="fast") == places(model="qwen")
    assert route(model="fast").model.name == "qwen"


def test_an_unknown_name_is_404_with_the_nearest() -> None:
    with pytest.raises(ApiError) as caught:
        places(model="Qwen")
    error = caught.value
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert error.message.startswith("The model `Qwen` does not exist. Did you mean `qwen`?")


def test_names_that_a_key_may_not_see_are_not_told() -> None:
    with pytest.raises(ApiError) as caught:
        places(model="Qwen", visible_models=("g*", "fast"))
    assert caught.value.message == "The model `Qwen` does not exist. This server serves: gpt, fast."
    assert model_names(SNAPSHOT) == ["qwen", "embed", "claude", "gpt", "fast"]


def test_an_unknown_name_goes_to_an_upstream_that_takes_any() -> None:
    assert places(replace(SNAPSHOT, default_upstream="open"), model="new") == [("open", "new")]
    assert places(replace(SNAPSHOT, fallback=("cloud", "open")), model="new") == [("open", "new")]


def test_a_request_without_a_model_gets_the_default() -> None:
    assert places(replace(SNAPSHOT, default_model="gpt"))[0] == ("cloud", "gpt")
    assert places(replace(SNAPSHOT, default_model="fast"))[0] == ("local", "qwen")
    assert places(replace(SNAPSHOT, default_upstream="local"))[0] == ("local", "qwen")
    assert places(replace(SNAPSHOT, models={"gpt": SNAPSHOT.models["gpt"]}))[0] == ("cloud", "gpt")
    with pytest.raises(ApiError) as caught:
        places()
    assert (caught.value.status, caught.value.code) == (400, "missing_model")
    assert "Send one of: qwen, embed" in caught.value.message


def test_a_rule_decides_alone_and_can_keep_requests_in_the_house() -> None:
    snapshot = with_rule({"key.tag": "private"}, "local")
    assert places(snapshot, model="gpt", key_tags=("private",)) == [("local", "qwen")]
    assert places(snapshot, model="gpt") == [("cloud", "gpt")]
    assert route(snapshot, model="gpt", key_tags=("private",)).rule == "rules[0]"


def test_a_rule_s_own_fallback_is_tried_after_its_target() -> None:
    snapshot = with_rule({"max_tokens": ">10"}, "cloud", fallback=("qwen", "open"))
    assert places(snapshot, model="qwen", max_tokens=11) == [("cloud", "claude"), ("local", "qwen"), ("open", "qwen")]


def test_a_rule_may_name_the_model_at_its_target_or_a_model_as_target() -> None:
    assert places(with_rule({}, "cloud", model="gpt"), model="qwen") == [("cloud", "gpt")]
    assert places(with_rule({}, "claude"), model="qwen") == [("cloud", "claude")]
    assert places(with_rule({}, "fast"), model="gpt") == [("local", "qwen")]


def test_a_rule_about_sizes_does_not_make_a_wrong_name_right() -> None:
    with pytest.raises(ApiError, match="`typo` does not exist"):
        places(with_rule({"max_tokens": ">10"}, "cloud"), model="typo", max_tokens=11)
    assert places(with_rule({"model": "typo"}, "cloud", model="gpt"), model="typo") == [("cloud", "gpt")]


@pytest.mark.parametrize(
    ("prompt", "asked", "first", "left_out"),
    [(100, None, "local", ()), (101, None, "cloud", ("local",)), (60, 41, "cloud", ("local",)), (60, 40, "local", ())],
)
def test_what_does_not_fit_into_a_context_is_not_sent_there(
    prompt: int, asked: int | None, first: str, left_out: tuple[str, ...]
) -> None:
    found = route(model="qwen", prompt_tokens=prompt, max_tokens=asked)
    assert found.attempts[0].upstream.name == first
    assert found.too_small == left_out


def test_a_request_that_fits_nowhere_is_sent_for_the_upstream_to_refuse() -> None:
    found = route(model="qwen", prompt_tokens=5000)
    assert [attempt.upstream.name for attempt in found.attempts] == ["local", "cloud"]
    assert found.too_small == ()


def test_an_attempt_has_the_context_and_price_of_the_model_that_answers() -> None:
    first, second = route(model="qwen").attempts
    assert (first.context_window, first.price) == (100, CHEAP)
    assert (second.context_window, second.price) == (1000, DEAR)


@given(
    st.sampled_from(["qwen", "embed", "claude", "gpt", "fast"]),
    st.sampled_from(["chat", "embeddings", "messages"]),
    st.integers(0, 3000),
    st.none() | st.integers(1, 3000),
    st.lists(st.sampled_from(["local", "cloud", "open"]), max_size=3),
)
def test_a_route_never_asks_a_place_twice_nor_for_what_it_does_not_serve(
    model: str, endpoint: str, prompt: int, asked: int | None, fallback: list[str]
) -> None:
    snapshot = replace(SNAPSHOT, fallback=tuple(fallback))
    found = route(snapshot, model=model, endpoint=endpoint, prompt_tokens=prompt, max_tokens=asked)
    pairs = [(attempt.upstream.name, attempt.model) for attempt in found.attempts]
    assert len(pairs) == len(set(pairs)) > 0
    assert all(attempt.upstream.serves(attempt.model) for attempt in found.attempts)
    assert (
        decide(snapshot, RequestFacts(endpoint=endpoint, model=model, prompt_tokens=prompt, max_tokens=asked)) == found
    )


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        (b"", 0, 0),
        (b"[1, 2, 3]", 3, 3),
        (b"[[1,2],[3]]", 3, 3),
        (json.dumps("The quick brown fox jumps over the lazy dog.").encode(), 9, 14),
        ("你好，世界。请用一句话解释什么是分页注意力。".encode(), 14, 24),
        (json.dumps("你好，世界。请用一句话解释什么是分页注意力。").encode(), 14, 24),
        (b'[{"role":"user","content":"' + b"word " * 1000 + b'"}]', 1000, 1500),
        (b'{"image_url":{"url":"data:image/png;base64,' + b"iVBORw0K" * 100_000 + b'"}}', 900, 1100),
    ],
)
def test_the_estimate_is_near_what_a_tokenizer_counts(text: bytes, low: int, high: int) -> None:
    assert low <= estimate_tokens(text) <= high


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_estimate_takes_any_bytes_and_is_no_less_for_more_text(start: bytes, more: bytes) -> None:
    plain = b"text " + start.replace(b"base64", b"").replace(b"\\u", b"")
    assert 0 <= estimate_tokens(plain) <= estimate_tokens(plain + b" plain words") + 1
    assert estimate_tokens(start + more) >= 0


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (b"[" + b"1," * 500_000 + b"null]", 277_779),
        (b"[" + b"1" * 1_000_000 + b".5]", 277_779),
        (b" " * 1_000_000 + b"5", 277_778),
        (b"[" + b"[1,2]," * 100_000 + b"[3]]", 200_001),
        (b"[[],[]]", 2),
    ],
    ids=["ids and null", "a long number", "blanks", "lists of ids", "no ids"],
)
def test_no_prompt_takes_long_to_be_estimated(text: bytes, tokens: int) -> None:
    assert estimate_tokens(text) == tokens
