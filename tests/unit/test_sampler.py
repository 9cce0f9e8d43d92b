"""What the runtime hands the sampler: nothing when nobody asks, and random numbers without state."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.plan import NewSequence
from headrace.kernels.draws import random_stream, uniforms
from headrace.kernels.ops import SamplingRows
from headrace.protocol.ipc import SamplingParams
from headrace.runtime.sampling import SequenceSampling, sampling_rows
from headrace.runtime.token_counts import TokenCounts

PROMPT = (5, 6, 5)
VOCAB = 50


def rows_of(*asked: dict[str, object], generated: tuple[int, ...] = ()) -> SamplingRows:
    """Rows for sequences of PROMPT and `generated`, greedy unless asked otherwise."""
    states = [
        SequenceSampling.of(
            NewSequence(i, PROMPT, len(PROMPT), 0, SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **params}))  # type: ignore[arg-type]
        )
        for i, params in enumerate(asked)
    ]
    tokens = np.array([*PROMPT, *generated], np.int32)
    return sampling_rows(states, [tokens] * len(states), VOCAB)


def pairs(rows: SamplingRows, name: str) -> list[dict[int, float]]:
    lists = getattr(rows, name)
    return [
        dict(zip(lists.token_ids[a:b].tolist(), lists.numbers[a:b].tolist(), strict=True))
        for a, b in zip(lists.starts[:-1], lists.starts[1:], strict=True)
    ]


def test_greedy_rows_carry_nothing_else() -> None:
    rows = rows_of({}, {"top_p": 0.5, "top_k": 3, "seed": 7})
    optional = [getattr(rows, n) for n in SamplingRows.__slots__ if n not in ("temperature", "uniforms")]
    assert rows.temperature.tolist() == [0.0, 0.0] and not any(part is not None for part in optional)


def test_a_part_that_one_row_needs_is_neutral_for_the_others() -> None:
    rows = rows_of({"temperature": 1.0, "top_p": 0.5}, {"temperature": 0.5, "top_k": 9}, {"min_p": 0.25, "logprobs": 2})
    assert rows.temperature.tolist() == [1.0, 0.5, 0.0]
    assert rows.top_p is not None and rows.top_p.tolist() == [0.5, 1.0, 1.0]
    assert rows.top_k is not None and rows.top_k.tolist() == [0, 9, 0]
    assert rows.min_p is not None and rows.min_p.tolist() == [0.0, 0.0, 0.25]
    assert rows.repetition_penalty is None and rows.seen is None and rows.num_logprobs == 2


def test_repetition_counts_the_prompt_and_presence_only_what_was_generated() -> None:
    rows = rows_of({"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {}, generated=(6, 9, 9))
    assert pairs(rows, "seen") == [{5: 2, 6: 2, 9: 2}, {}, {}]
    assert pairs(rows, "generated") == [{}, {6: 1, 9: 2}, {}]


@pytest.mark.parametrize("start", [0, 3, 150])
def test_tokens_counted_as_they_come_are_counted_right(start: int) -> None:
    tokens = np.random.default_rng(start).integers(0, 200, 600).astype(np.int32)
    counts = TokenCounts(start)
    for stop in [*range(start, 300, 7), 300, 300, 599, 600]:
        counts.follow(tokens[:stop])
        expected = np.unique(tokens[start:stop], return_counts=True)
        found = dict(zip(counts.tokens.tolist(), counts.counts.tolist(), strict=True))
        assert found == dict(zip(*(part.tolist() for part in expected), strict=True))


def test_biases_reach_their_rows() -> None:
    assert pairs(rows_of({}, {"logit_bias": {3: -1.5, 1: 2.0}}), "logit_bias") == [{}, {3: -1.5, 1: 2.0}]


def test_stop_tokens_are_forbidden_until_enough_tokens_are_there() -> None:
    params = {"min_tokens": 2, "stop_token_ids": (7, 8, 7, VOCAB)}
    assert pairs(rows_of(params, generated=(1,)), "forbidden") == [{7: 2, 8: 1}]
    assert rows_of(params, generated=(1, 2)).forbidden is None


def test_random_numbers_depend_on_seed_index_and_position_only() -> None:
    base = uniforms([random_stream(1, 0)], [10])[0]
    others = [(2, 0, 10), (1, 1, 10), (1, 0, 11), (-1, 0, 10), (1 << 70, 0, 10)]
    assert len({base, *(uniforms([random_stream(s, i)], [p])[0] for s, i, p in others)}) == 6
    streams = [random_stream(1, 0), random_stream(9, 4)]
    assert uniforms(streams, [10, 3])[0] == base


def test_random_numbers_are_those_documented() -> None:
    """Against splitmix64 written out in numpy: an answer given for a seed must be the same in every release."""

    def mix(word: np.ndarray) -> np.ndarray:
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))

    golden, seed, index, position = (np.array([n], np.uint64) for n in (0x9E3779B97F4A7C15, 42, 3, 17))
    one = np.uint64(1)
    stream = mix(mix(seed + golden) + golden * (index + one))
    expected = (mix(stream + golden * (position + one)) >> np.uint64(40)).astype(np.float64) / 2**24
    assert uniforms([random_stream(42, 3)], [17]).tolist() == expected.tolist()


def test_random_numbers_fill_the_unit_interval_evenly() -> None:
    drawn = uniforms([random_stream(0, 0)] * 4000, range(4000))
    assert drawn.dtype == np.float32 and drawn.min() >= 0 and drawn.max() < 1
    counts = np.bincount((drawn * 10).astype(int), minlength=10)
    assert counts.min() > 320 and counts.max() < 480
