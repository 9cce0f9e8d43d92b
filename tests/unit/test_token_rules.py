"""Bad words, allowed tokens, repetition: which tokens are forbidden where, and when an answer repeats itself."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.repetition import repeats
from headrace.protocol.errors import ApiError
from headrace.protocol.ipc import RepetitionDetection, SamplingParams
from headrace.protocol.token_limits import (
    RepetitionFields,
    allowed_tokens,
    check_bad_words,
    listed_tokens,
    repetition_detection,
    truncated,
)
from headrace.runtime.token_rules import TokenRules
from headrace.text.bad_words import bad_word_tokens
from tests.scripted_engine import tokenizer


def forbidden(generated: list[int], **params: object) -> set[int]:
    rules = TokenRules.of(SamplingParams(max_tokens=9, **params))  # type: ignore[arg-type]
    return set(rules.forbidden(np.array(generated, np.int32), 50).tolist())


def test_the_last_token_of_a_bad_word_is_forbidden_where_the_others_came_before() -> None:
    words = ((7, 8, 9), (8, 1), (4,), (7, 8, 6))
    assert forbidden([], bad_words=words) == {4}
    assert forbidden([8], bad_words=words) == {4, 1}
    assert forbidden([7, 8], bad_words=words) == {4, 1, 9, 6}
    assert forbidden([7, 8, 3], bad_words=words) == {4}


def test_stop_tokens_are_forbidden_besides_until_there_are_enough() -> None:
    both = {"bad_words": ((4,),), "min_tokens": 2, "stop_token_ids": (5, 99)}
    assert forbidden([1], **both) == {4, 5}
    assert forbidden([1, 1], **both) == {4}


def test_a_bad_word_is_its_tokens_with_and_without_a_space_before_it() -> None:
    words = tokenizer()
    found = bad_word_tokens(words, ["water", " water", "water wheel"])
    texts = [words.decode(ids) for ids in found]
    assert texts == ["water", " water", "water wheel", " water wheel"]
    for token_ids, text in zip(found, texts, strict=True):
        assert list(token_ids) == words.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("said", "largest", "smallest", "count", "found"),
    [
        ([1, 2, 1, 2, 1, 2], 2, 1, 3, True),
        ([1, 2, 1, 2, 1, 2], 1, 1, 3, False),
        ([9, 9, 9], 1, 1, 3, True),
        ([9, 9], 1, 1, 3, False),
        ([9, 9, 9, 9], 4, 2, 2, True),
        ([9, 9, 9], 4, 2, 2, False),
        ([1, 2, 3, 1, 2, 3, 4], 5, 1, 2, False),
        ([5, 1, 2, 3, 1, 2, 3], 5, 1, 2, True),
        ([], 3, 1, 2, False),
    ],
)
def test_a_pattern_at_the_end_as_often_as_asked_is_repetition(
    said: list[int], largest: int, smallest: int, count: int, found: bool
) -> None:
    rule = RepetitionDetection(largest, smallest, count)
    assert repeats(said, 0, rule) is found
    prompt = said[-4:] * 3
    assert repeats(prompt + said, len(prompt), rule) is found, "the prompt does not count"


def test_repetition_agrees_with_the_words_of_its_description() -> None:
    rng = np.random.default_rng(0)
    for _ in range(2000):
        said = rng.integers(0, 2, rng.integers(0, 14)).tolist()
        rule = RepetitionDetection(int(rng.integers(1, 6)), 1, int(rng.integers(2, 5)))
        sizes = [s for s in range(1, rule.max_pattern_size + 1) if s * rule.min_count <= len(said)]
        plain = any(said[-s * rule.min_count :] == said[-s:] * rule.min_count for s in sizes)
        assert repeats(said, 0, rule) is plain, (said, rule)


def test_what_could_leave_no_token_to_generate_is_refused() -> None:
    assert allowed_tokens([3, 3, 1], ((7, 1),), (), 10) == (3, 1)
    assert allowed_tokens(None, ((1,),), (2,), 10) is None
    for asked, bad_words, not_yet in (([], (), ()), ([1], ((7, 1),), ()), ([2], (), (2,)), ([10], (), ())):
        with pytest.raises(ApiError) as caught:
            allowed_tokens(asked, bad_words, not_yet, 10)
        assert (caught.value.status, caught.value.param) == (400, "allowed_token_ids")
    with pytest.raises(ApiError, match="no token to generate"):
        allowed_tokens(None, tuple((i,) for i in range(10)), (), 10)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_pattern_size": 5}, "min_count"),
        ({"max_pattern_size": 5, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 5, "min_pattern_size": 6, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 1025, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": -1, "min_count": 2}, "max_pattern_size"),
    ],
)
def test_a_repetition_that_cannot_be_looked_for_is_refused(fields: dict[str, int], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        repetition_detection(RepetitionFields(**fields))
    assert caught.value.param == f"repetition_detection.{param}"


def test_repetition_detection_is_off_unless_a_size_is_given() -> None:
    assert repetition_detection(None) is repetition_detection(RepetitionFields()) is None
    assert repetition_detection(RepetitionFields(max_pattern_size=3, min_count=2)) == RepetitionDetection(3, 1, 2)


def test_a_prompt_is_cut_at_the_side_asked_for() -> None:
    prompt, limits = list(range(10)), {"max_model_len": 16, "max_tokens": 9}
    assert truncated(prompt, None, None, **limits) == prompt
    assert truncated(prompt, 3, None, **limits) == [7, 8, 9]
    assert truncated(prompt, 3, "right", **limits) == [0, 1, 2]
    assert truncated(prompt, -1, "left", **limits) == prompt[-7:]
    assert truncated(prompt, 12, "left", **limits) == prompt
    with pytest.raises(ApiError, match="between 1 and 16"):
        truncated(prompt, 17, None, **limits)


def test_lists_that_are_too_long_or_empty_are_refused() -> None:
    with pytest.raises(ApiError, match="empty string"):
        check_bad_words(["a", " "])
    with pytest.raises(ApiError, match="at most 1024"):
        check_bad_words(["a"] * 1025)
    with pytest.raises(ApiError, match="only together with"):
        listed_tokens([1], None, 10)
    with pytest.raises(ApiError, match="at most 1024"):
        listed_tokens([1] * 1025, 0, 10)
    assert listed_tokens([4, 2, 4], 0, 10) == (4, 2)
