"""Sampling against a plain twin that sorts every row whole, and independence of a row from its neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.kernels.ops import InvalidLogits, SampledRows, SamplingRows, TokenLists  # noqa: E402
from headrace.kernels.reference import ReferenceKernels  # noqa: E402

VOCAB = 2000


def logits(rows: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * spread).astype(np.float32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def sample(values: np.ndarray, rows: SamplingRows) -> SampledRows:
    return ReferenceKernels().sample(torch.from_numpy(values), rows)


def greedy(rows: int, **parts: object) -> SamplingRows:
    return SamplingRows(temperature=np.zeros(rows, np.float32), uniforms=np.zeros(rows, np.float32), **parts)  # type: ignore[arg-type]


def lists(*rows: dict[int, float]) -> TokenLists:
    starts = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32)
    tokens = np.array([t for row in rows for t in row], np.int32)
    return TokenLists(starts, tokens, np.array([n for row in rows for n in row.values()], np.float32))


def plain_draw(row: np.ndarray, temperature: float, u: float, k: int = 0, p: float = 1.0, m: float = 0.0) -> int:
    """One row, sorted whole, in the words of the operation's description."""
    shifted = (row - row.max()) / np.float32(temperature)
    weights = np.exp(shifted.astype(np.float32)).astype(np.float64)
    if not 0 < k < len(row) and p >= 1 and m <= 0:
        order = np.arange(len(row))
    else:
        order = np.argsort(-shifted, kind="stable")
        order = order[: k or None]
        sums = np.cumsum(weights[order])
        keep = (sums - weights[order] < p * sums[-1]) | (p >= 1)
        keep &= weights[order] >= m
        keep[0] = True
        order = order[keep]
    sums = np.cumsum(weights[order])
    return int(order[np.searchsorted(sums, u * sums[-1], side="right")])


def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals() -> None:
    values = logits(3)
    values[1, [70, 30, 900]] = 50.0
    result = sample(values, greedy(3))
    assert result.token_ids.tolist() == [values[0].argmax(), 30, values[2].argmax()]
    assert result.token_ids.dtype == np.int32 and result.logprobs is None


FILTERS = [
    {},
    {"k": 5},
    {"k": 1},
    {"p": 0.9},
    {"p": 0.01},
    {"m": 0.05},
    {"k": 600},
    {"k": 40, "p": 0.8, "m": 0.01},
    {"p": 0.9999},
    {"k": VOCAB + 5},
]


@pytest.mark.parametrize("spread", [3.0, 0.1])
def test_draws_equal_those_of_the_whole_sorted_row_for_every_filter(spread: float) -> None:
    """A spread of 0.1 leaves more tokens than the candidates that are sorted first."""
    rng = np.random.default_rng(1)
    cases = [(f, t, u) for f in FILTERS for t in (0.3, 1.0, 2.0) for u in (*rng.random(3), 0.0, 1 - 2**-24)]
    values = logits(len(cases), seed=2, spread=spread)
    rows = SamplingRows(
        temperature=floats(*(t for _, t, _ in cases)),
        uniforms=floats(*(u for _, _, u in cases)),
        top_k=np.array([f.get("k", 0) for f, _, _ in cases], np.int32),
        top_p=floats(*(f.get("p", 1.0) for f, _, _ in cases)),
        min_p=floats(*(f.get("m", 0.0) for f, _, _ in cases)),
    )
    uniforms = rows.uniforms.astype(np.float64)
    assert rows.top_p is not None
    assert rows.min_p is not None
    expected = [
        plain_draw(values[i], t, uniforms[i], f.get("k", 0), float(rows.top_p[i]), float(rows.min_p[i]))
        for i, (f, t, _) in enumerate(cases)
    ]
    drawn = sample(values, rows).token_ids.tolist()
    # A twin's last bit may differ where a running sum meets its target.
    assert sum(a != b for a, b in zip(drawn, expected, strict=True)) <= 1


def test_a_row_draws_the_same_token_alone_and_among_others() -> None:
    values = logits(40, seed=3)
    rng = np.random.default_rng(4)
    rows = SamplingRows(
        temperature=floats(*rng.choice([0.0, 0.7, 1.5], 40)),
        uniforms=rng.random(40, np.float32),
        top_k=rng.choice([0, 0, 10, 700], 40).astype(np.int32),
        top_p=floats(*rng.choice([1.0, 0.8, 0.999], 40)),
    )
    together = sample(values, rows).token_ids
    assert rows.top_k is not None and rows.top_p is not None
    for i in range(40):
        alone = SamplingRows(
            temperature=rows.temperature[i : i + 1],
            uniforms=rows.uniforms[i : i + 1],
            top_k=rows.top_k[i : i + 1],
            top_p=rows.top_p[i : i + 1],
        )
        assert sample(values[i : i + 1], alone).token_ids[0] == together[i]


def test_equal_logits_are_taken_in_order_of_their_ids_also_across_the_candidates_edge() -> None:
    values = np.zeros((4, VOCAB), np.float32)
    rows = SamplingRows(
        temperature=np.ones(4, np.float32),
        uniforms=floats(0.0, 0.5, 0.999, 0.5),
        top_k=np.array([1, 2, 1000, 0], np.int32),
        top_p=floats(1.0, 1.0, 1.0, 0.5),
    )
    assert sample(values, rows).token_ids.tolist() == [0, 1, 999, 500]


def test_draws_follow_the_distribution() -> None:
    """Uniforms on a grid: each token is drawn as often as its probability says, in steps of the grid."""
    n = 1000
    values = np.tile(np.log(floats(0.1, 0.2, 0.3, 0.4)), (n, 1))
    rows = SamplingRows(temperature=np.ones(n, np.float32), uniforms=(np.arange(n) / n + 5e-4).astype(np.float32))
    assert np.bincount(sample(values, rows).token_ids).tolist() == [100, 200, 300, 400]
    half = replace(rows, temperature=np.full(n, 0.5, np.float32))
    np.testing.assert_allclose(
        np.bincount(sample(values, half).token_ids) / n, [1 / 30, 4 / 30, 9 / 30, 16 / 30], atol=2e-3
    )


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    values = logits(2, spread=100.0)
    rows = SamplingRows(temperature=floats(1e-30, 1e-5), uniforms=floats(0.999, 0.0), top_p=floats(0.9, 1.0))
    assert sample(values, rows).token_ids.tolist() == values.argmax(1).tolist()


def test_penalties_biases_and_forbidden_tokens_change_the_logits_as_described() -> None:
    values = np.full((5, 6), -10.0, np.float32)
    values[:, 0], values[:, 1], values[:, 2] = 4.0, 3.0, -1.0
    rows = greedy(
        5,
        repetition_penalty=floats(2.0, 1.0, 1.0, 1.0, 1.0),
        seen=lists({0: 9, 2: 1}, {}, {}, {}, {}),
        frequency_penalty=floats(0.0, 0.6, 0.0, 0.0, 0.0),
        presence_penalty=floats(0.0, 0.0, 1.5, 0.0, 0.0),
        generated=lists({}, {0: 2}, {0: 7}, {}, {}),
        logit_bias=lists({}, {}, {}, {4: 100.0, 0: -100.0}, {}),
        forbidden=lists({}, {}, {}, {}, {0: 1, 1: 1}),
        num_logprobs=0,
    )
    result = sample(values, rows)
    assert result.token_ids.tolist() == [1, 1, 1, 4, 2]
    assert result.logprobs is not None
    raw = torch.from_numpy(values).log_softmax(-1).numpy()
    np.testing.assert_allclose(result.logprobs, raw[np.arange(5), result.token_ids], atol=1e-6)


def test_a_negative_logit_is_made_smaller_by_the_repetition_penalty() -> None:
    values = np.array([[-1.0, -1.5]], np.float32)
    rows = greedy(1, repetition_penalty=floats(2.0), seen=lists({0: 1}))
    assert sample(values, rows).token_ids.tolist() == [1]


def test_logprobs_are_of_the_raw_logits_with_ranks_and_the_best_alternatives() -> None:
    values = logits(3, seed=5)
    values[0, [5, 6]] = values[0].max() + 1
    rows = SamplingRows(temperature=floats(0, 2.0, 0), uniforms=floats(0, 0.7, 0), num_logprobs=4)
    result = sample(values, rows)
    exact = torch.from_numpy(values).double().log_softmax(-1).numpy()
    assert result.logprobs is not None and result.ranks is not None
    assert result.top_token_ids is not None and result.top_logprobs is not None
    for i, token in enumerate(result.token_ids.tolist()):
        order = np.argsort(-values[i], kind="stable")[:4]
        assert result.top_token_ids[i].tolist() == order.tolist()
        np.testing.assert_allclose(result.top_logprobs[i], exact[i, order], atol=1e-5)
        np.testing.assert_allclose(result.logprobs[i], exact[i, token], atol=1e-5)
        assert result.ranks[i] == 1 + (values[i] > values[i, token]).sum()
    assert result.top_token_ids[0, :2].tolist() == [5, 6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_logits_that_are_not_numbers_name_their_rows(temperature: float, poison: float) -> None:
    values = logits(4)
    values[1, 17] = poison
    values[3, 1999] = poison
    rows = SamplingRows(temperature=np.full(4, temperature, np.float32), uniforms=np.zeros(4, np.float32))
    with pytest.raises(InvalidLogits) as caught:
        sample(values, rows)
    assert caught.value.rows == (1, 3)


def test_only_allowed_tokens_are_taken_and_a_row_that_lists_none_may_take_all() -> None:
    values = logits(3)
    best = values.argmax(1)
    result = sample(values, greedy(3, allowed=lists({5: 1, 900: 1}, {}, {int(best[2]): 1, 1: 1})))
    assert result.token_ids.tolist() == [5 if values[0, 5] > values[0, 900] else 900, best[1], best[2]]
    forbidden = greedy(1, allowed=lists({5: 1, 900: 1}), forbidden=lists({900: 1}))
    assert sample(values[:1], forbidden).token_ids.tolist() == [5]


def test_a_mask_leaves_the_tokens_whose_bit_is_set_in_the_rows_that_are_masked() -> None:
    values = logits(3)
    best = values.argmax(1)
    mask = np.zeros((3, -(-values.shape[1] // 32)), np.uint32)
    for token in (5, 31, 32, 900):
        mask[:, token // 32] |= np.uint32(1 << token % 32)
    left = [int(max((5, 31, 32, 900), key=lambda token, row=row: values[row, token])) for row in range(3)]
    assert sample(values, greedy(3, mask=mask)).token_ids.tolist() == left
    some = greedy(3, mask=mask, masked=np.array([1, 0, 1], np.uint8))
    assert sample(values, some).token_ids.tolist() == [left[0], best[1], left[2]]
    both = greedy(3, mask=mask, allowed=lists({5: 1, 6: 1}, {}, {900: 1}))
    assert sample(values, both).token_ids.tolist() == [5, left[1], 900]
    before = sample(values, greedy(3, num_logprobs=2))
    after = sample(values, greedy(3, mask=mask, num_logprobs=2))
    assert np.array_equal(before.top_logprobs, after.top_logprobs), "log-probabilities are of the raw logits"


def test_a_draw_stays_within_the_allowed_tokens() -> None:
    values = np.repeat(logits(1), 200, axis=0)
    rows = SamplingRows(
        temperature=np.full(200, 2.0, np.float32),
        uniforms=np.linspace(0, 0.999, 200, dtype=np.float32),
        allowed=lists(*([{7: 1, 70: 1, 700: 1}] * 200)),
    )
    assert set(sample(values, rows).token_ids.tolist()) == {7, 70, 700}


def test_a_given_token_is_scored_and_nothing_is_chosen() -> None:
    values = logits(70)
    given = np.array([-1, *range(69)], np.int32)
    result = sample(values, greedy(70, given=given, num_logprobs=2))
    assert result.token_ids.tolist() == [values[0].argmax(), *range(69)]
    expected = torch.log_softmax(torch.from_numpy(values).double(), 1)
    assert result.logprobs is not None and result.ranks is not None
    np.testing.assert_allclose(result.logprobs[1:], [expected[i + 1, i] for i in range(69)], rtol=1e-5)
    assert result.ranks[3] == (values[3] > values[3, 2]).sum() + 1
    alone = sample(values[40:41], greedy(1, given=given[40:41], num_logprobs=2))
    assert alone.logprobs is not None and alone.logprobs[0] == result.logprobs[40], (
        "alone and among others, bit for bit"
    )


def test_listed_tokens_are_scored_whatever_their_rank() -> None:
    values = logits(3)
    result = sample(values, greedy(3, num_logprobs=0, scored=lists({9: 1, 3: 1}, {}, {1999: 1})))
    expected = torch.log_softmax(torch.from_numpy(values).double(), 1)
    assert result.scored_logprobs is not None
    wanted = [expected[0, 9], expected[0, 3], expected[2, 1999]]
    np.testing.assert_allclose(result.scored_logprobs, wanted, rtol=1e-5)
