"""The native choice of tokens against the reference's on the same rows, drawn at random, and where ties decide."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from headrace.kernels.native import NativeKernels, library, variants  # noqa: E402
from headrace.kernels.ops import InvalidLogits, SampledRows, SamplingRows, TokenLists  # noqa: E402
from headrace.kernels.reference import sampling as reference  # noqa: E402

VARIANTS = variants()

CASES = [(variant, threads) for variant in VARIANTS for threads in (1, 3)]
VOCABS = [1, 2, 5, 15, 16, 17, 33, 777, 1024, 1030, 5000]


@cache
def kernels_of(variant: str, threads: int) -> NativeKernels:
    return NativeKernels(threads=threads, variant=variant)


def teardown_module() -> None:
    kernels_of.cache_clear()


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return kernels_of(*request.param)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def rows_of(rows: SamplingRows, index: list[int]) -> SamplingRows:
    """The same settings for these rows only."""

    def part(value: Any) -> Any:
        if isinstance(value, TokenLists):
            pieces = [slice(value.starts[i], value.starts[i + 1]) for i in index]
            starts = np.cumsum([0, *(p.stop - p.start for p in pieces)]).astype(np.int32)
            token_ids, numbers = (np.concatenate([a[p] for p in pieces]) for a in (value.token_ids, value.numbers))
            return TokenLists(starts, token_ids, numbers)
        return value[index] if isinstance(value, np.ndarray) else value

    return SamplingRows(**{field.name: part(getattr(rows, field.name)) for field in fields(rows)})


def some_rows(rng: np.random.Generator, vocab: int, most: int = 8) -> tuple[np.ndarray, SamplingRows]:
    """Logits spread, peaked, full of ties or all equal, and settings of every kind."""
    count = int(rng.integers(1, most + 1))
    logits = rng.standard_normal((count, vocab)) * rng.choice([0.01, 0.3, 3, 10])
    form = rng.integers(4)
    if form == 1:
        logits = np.round(logits)
    elif form == 2:
        logits[:] = -3
    elif form == 3:
        logits[:, rng.integers(vocab)] += 20

    def maybe(*values: float, dtype: Any = np.float32) -> np.ndarray | None:
        return rng.choice(values, count).astype(dtype) if rng.random() < 0.35 else None

    def lists(most: int, numbers: Any = None) -> TokenLists | None:
        if rng.random() > 0.3:
            return None
        rows = [
            rng.choice(vocab, rng.integers(0, max(min(most, vocab - 1), 0) + 1), replace=False) for _ in range(count)
        ]
        token_ids = np.concatenate(rows).astype(np.int32)
        starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        values = np.ones(len(token_ids)) if numbers is None else rng.choice(numbers, len(token_ids))
        return TokenLists(starts, token_ids, values.astype(np.float32))

    allowed = lists(20)
    bits = rng.integers(0, 2**32, (count, -(-vocab // 32)), dtype=np.uint32) if rng.random() < 0.3 else None
    reported = rng.random() < 0.4
    return logits.astype(np.float32), SamplingRows(
        temperature=rng.choice([0, 0.2, 1, 1, 3, 1e-6, 100], count).astype(np.float32),
        uniforms=np.minimum(rng.random(count), 1 - 2**-24).astype(np.float32),
        top_k=maybe(0, 1, 2, 10, 50, 400, vocab - 1, vocab, vocab + 3, dtype=np.int32),
        top_p=maybe(1, 0.95, 0.5, 0.01, 0.999),
        min_p=maybe(0, 0.05, 0.5, 1, 1e-4),
        repetition_penalty=maybe(1, 1.2, 0.8),
        frequency_penalty=maybe(0, 0.5, -1),
        presence_penalty=maybe(0, 0.5, -1),
        seen=lists(9),
        generated=lists(9, [1, 2, 5]),
        logit_bias=lists(9, [-100, -3.3, 0.7, 40]),
        forbidden=lists(4) if allowed is None else None,
        allowed=allowed,
        mask=bits,
        masked=maybe(0, 1, 1, dtype=np.uint8),
        given=maybe(-1, -1, 0, vocab - 1, dtype=np.int32),
        num_logprobs=int(rng.choice([0, 1, 5, 20])) if reported else None,
        scored=lists(5) if reported else None,
    )


def outcome(sample: Callable[[Any, SamplingRows], SampledRows], logits: Any, rows: SamplingRows) -> Any:
    """What was chosen, or the rows whose logits are no numbers."""
    try:
        return sample(logits, rows)
    except InvalidLogits as error:
        return error.rows


def assert_same(found: SampledRows, expected: SampledRows, logits: np.ndarray) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is None or expected.logprobs is None:
        return
    assert found.ranks is not None and expected.ranks is not None
    assert found.top_token_ids is not None and found.top_logprobs is not None and expected.top_logprobs is not None
    assert found.ranks.tolist() == expected.ranks.tolist()
    best = np.argsort(-logits, axis=1, kind="stable")[:, : found.top_token_ids.shape[1]]
    assert found.top_token_ids.tolist() == best.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, rtol=1e-5, atol=2e-5)
    if expected.scored_logprobs is not None:
        assert found.scored_logprobs is not None
        np.testing.assert_allclose(found.scored_logprobs, expected.scored_logprobs, rtol=1e-5, atol=2e-5)


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(VOCABS))
def test_every_row_gets_what_the_reference_gives_it(seed: int, vocab: int) -> None:
    logits, rows = some_rows(np.random.default_rng(seed), vocab)
    expected = outcome(reference.sample, torch.from_numpy(logits), rows)
    for case in CASES:
        found = outcome(kernels_of(*case).sample, logits, rows)
        if isinstance(expected, SampledRows):
            assert isinstance(found, SampledRows)
            assert_same(found, expected, logits)
        else:
            assert found == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_gets_the_same_alone_and_among_others_with_any_number_of_threads(variant: str) -> None:
    rng, compared = np.random.default_rng(5), 0
    while compared < 12:
        logits, rows = some_rows(rng, 3000)
        together = outcome(kernels_of(variant, 3).sample, logits, rows)
        if not isinstance(together, SampledRows):
            continue
        for i in range(len(logits)):
            part = rows_of(rows, [i])
            alone = kernels_of(variant, 1).sample(logits[i : i + 1], part)
            assert alone.token_ids[0] == together.token_ids[i]
            if alone.logprobs is not None and together.logprobs is not None:
                assert alone.logprobs[0] == together.logprobs[i]
        compared += 1


@pytest.mark.parametrize("vocab", [2000, 5000])
def test_equal_logits_are_taken_in_order_of_their_ids(kernels: NativeKernels, vocab: int) -> None:
    rows = SamplingRows(
        temperature=floats(0, 1, 1, 1, 1, 1, 1),
        uniforms=floats(0.9, 0.0, 0.5, 0.999, 0.5, 0.5, 0.9999),
        top_k=np.array([0, 1, 2, 1000, 0, 0, vocab - 1], np.int32),
        top_p=floats(1, 1, 1, 1, 0.5, 1, 1),
    )
    drawn = kernels.sample(np.full((7, vocab), 2.5, np.float32), rows).token_ids
    assert drawn.tolist() == [0, 0, 1, 999, vocab // 4, vocab // 2, vocab - 2]


def test_among_equals_at_the_edge_of_top_k_the_first_are_kept(kernels: NativeKernels) -> None:
    """9 is the best, then twenty equals of which top_k keeps the first four; -0 equals 0."""
    values = np.full(3000, -50, np.float32)
    equals = np.arange(100, 2100, 100)
    values[equals] = np.where(np.arange(20) % 2, 0.0, -0.0)
    values[9] = 0.5
    uniforms = np.linspace(0, 0.999, 50, dtype=np.float32)
    rows = SamplingRows(np.full(50, 10, np.float32), uniforms, top_k=np.full(50, 5, np.int32))
    drawn = kernels.sample(np.tile(values, (50, 1)), rows).token_ids
    assert sorted(set(drawn.tolist())) == [9, 100, 200, 300, 400]
    assert drawn.tolist() == sorted(drawn.tolist())


def test_draws_follow_the_distribution(kernels: NativeKernels) -> None:
    n = 1000
    values = np.tile(np.log(floats(0.1, 0.2, 0.3, 0.4)), (n, 1))
    rows = SamplingRows(temperature=np.ones(n, np.float32), uniforms=(np.arange(n) / n + 5e-4).astype(np.float32))
    assert np.bincount(kernels.sample(values, rows).token_ids).tolist() == [100, 200, 300, 400]
    nucleus = replace(rows, top_p=np.full(n, 0.69, np.float32))
    kept = np.bincount(kernels.sample(values, nucleus).token_ids, minlength=4) / n
    np.testing.assert_allclose(kept, [0, 0, 3 / 7, 4 / 7], atol=2e-3)


def test_a_tiny_temperature_is_greedy_without_overflow(kernels: NativeKernels) -> None:
    values = np.random.default_rng(0).standard_normal((4, 2000), dtype=np.float32) * 100
    rows = SamplingRows(
        temperature=floats(1e-30, 1e-45, 1e-6, 1e-6),
        uniforms=floats(0.999, 0.999, 0.5, 0.0),
        top_p=floats(1.0, 0.9, 0.9, 1.0),
    )
    assert kernels.sample(values, rows).token_ids.tolist() == values.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_whose_logits_are_no_numbers_are_named(kernels: NativeKernels, temperature: float) -> None:
    values = np.random.default_rng(0).standard_normal((6, 3000), dtype=np.float32)
    values[1, 2999] = np.nan
    values[3, 0] = np.inf
    values[4] = -np.inf
    values[5, 17] = -np.inf
    rows = SamplingRows(np.full(6, temperature, np.float32), np.full(6, 0.5, np.float32))
    with pytest.raises(InvalidLogits) as raised:
        kernels.sample(values, rows)
    assert raised.value.rows == (1, 3, 4)


@pytest.mark.parametrize("spoilt", [np.nan, -np.inf])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_without_any_number_still_gets_a_token_of_the_vocabulary(variant: str, vocab: int, spoilt: float) -> None:
    """Its probabilities are looked up by that token before anybody is told that the row is broken."""
    logits = np.full((2, vocab), spoilt, np.float32)
    temperature, uniforms = floats(0, 1), floats(0.5, 0.5)
    token_ids, broken = np.full(2, -1, np.int32), np.empty(2, np.uint8)
    arguments = library.SampleArgs(
        logits=library.View(logits.ctypes.data, vocab), rows=2, vocab=vocab, temperature=temperature.ctypes.data,
        uniforms=uniforms.ctypes.data, num_logprobs=-1, token_ids=token_ids.ctypes.data, broken=broken.ctypes.data,
    )  # fmt: skip
    library.load().hr_sample(kernels_of(variant, 1)._device.pointer, ctypes.byref(arguments))
    assert ((token_ids >= 0) & (token_ids < vocab)).all()
    assert broken.tolist() == [1, 1]


@pytest.mark.parametrize("vocab", [31, 64, 3000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mask_leaves_the_tokens_whose_bit_is_set(variant: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((6, vocab), dtype=np.float32)
    permitted = rng.random((6, vocab)) < 0.3
    permitted[:, -1] = True
    bits = np.ones((6, -(-vocab // 32) * 32), np.uint8)
    bits[:, :vocab] = permitted
    mask = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    masked = np.array([1, 1, 0, 1, 1, 0], np.uint8)
    temperature, uniforms = floats(0, 1, 0, 1, 0, 1), floats(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    token_ids, broken = np.empty(6, np.int32), np.empty(6, np.uint8)
    arguments = library.SampleArgs(
        logits=library.View(logits.ctypes.data, vocab), rows=6, vocab=vocab, temperature=temperature.ctypes.data,
        uniforms=uniforms.ctypes.data, mask=mask.ctypes.data, masked=masked.ctypes.data, num_logprobs=-1,
        token_ids=token_ids.ctypes.data, broken=broken.ctypes.data,
    )  # fmt: skip
    library.load().hr_sample(kernels_of(variant, 3)._device.pointer, ctypes.byref(arguments))
    hidden = np.where(permitted | (masked[:, None] == 0), logits, -np.inf).astype(np.float32)
    expected = reference.sample(torch.from_numpy(hidden), SamplingRows(temperature, uniforms))
    assert token_ids.tolist() == expected.token_ids.tolist()
    assert not broken.any()
