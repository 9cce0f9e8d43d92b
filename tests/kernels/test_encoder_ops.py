"""The operations of models that read a whole text at once, native in every variant this CPU runs and reference, against
their formulas; and the promise that a sequence's bits do not depend on what it is computed with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.kernels.native import NativeKernels, variants
from headrace.kernels.ops import Batch, Float32
from headrace.kernels.reference import ReferenceKernels
from headrace.kernels.weight import Weight

LENGTHS = (1, 16, 3, 257, 49)
WIDTHS = (1, 16, 17, 384)

Run = Callable[..., Float32]


def random(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def whole_texts(lengths: tuple[int, ...], positions: np.ndarray | None = None) -> Batch:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    own = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    return Batch(
        token_ids=np.zeros(starts[-1], np.int32),
        positions=own if positions is None else positions.astype(np.int32),
        slot_mapping=np.zeros((1, starts[-1]), np.int32),
        query_start=starts,
        seq_lens=np.array(lengths, np.int32),
        block_tables=np.zeros((1, len(lengths), 1), np.int32),
        sample_rows=starts[:-1],
    )


def native(variant: str, threads: int = 1) -> tuple[NativeKernels, Run]:
    kernels = NativeKernels(threads=threads, variant=variant)

    def run(forward: Callable[..., Any], inputs: list[Float32], batch: Batch) -> Float32:
        return kernels.evaluate(forward, inputs, batch)

    return kernels, run


def reference() -> tuple[ReferenceKernels, Run]:
    import torch

    kernels = ReferenceKernels()

    def run(forward: Callable[..., Any], inputs: list[Float32], batch: Batch) -> Float32:
        return kernels.host_rows(forward(kernels.load_batch(batch), *map(torch.from_numpy, inputs)))

    return kernels, run


@pytest.fixture(params=[*variants(), "reference"])
def device(request: pytest.FixtureRequest) -> tuple[Any, Run]:
    return reference() if request.param == "reference" else native(request.param)


def expected_attention(q: Float32, k: Float32, v: Float32, lengths: tuple[int, ...], heads: int) -> np.ndarray:
    out, start = np.empty(q.shape), 0
    for length in lengths:
        own = slice(start, start + length)
        split = (x[own].astype(np.float64).reshape(length, heads, -1).transpose(1, 0, 2) for x in (q, k, v))
        queries, keys, values = split
        scores = queries @ keys.transpose(0, 2, 1) * 0.2
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = weights / weights.sum(-1, keepdims=True) @ values
        out[own] = attended.transpose(1, 0, 2).reshape(length, -1)
        start += length
    return out


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 32), (1, 64), (5, 7)])
def test_every_row_attends_to_all_of_its_text(device: tuple[Any, Run], heads: int, head_dim: int) -> None:
    kernels, run = device
    q, k, v = (random(sum(LENGTHS), heads * head_dim, seed=seed) for seed in range(3))
    attended = run(
        lambda batch, *qkv: kernels.encoder_attention(*qkv, num_heads=heads, scale=0.2, batch=batch),
        [q, k, v],
        whole_texts(LENGTHS),
    )
    np.testing.assert_allclose(attended, expected_attention(q, k, v, LENGTHS, heads), rtol=1e-5, atol=2e-6)


def test_a_text_is_attended_the_same_alone_and_among_others(device: tuple[Any, Run]) -> None:
    kernels, run = device
    q, k, v = (random(sum(LENGTHS), 3 * 20, seed=seed) for seed in range(3))

    def attend(batch: object, *qkv: object) -> Any:
        return kernels.encoder_attention(*qkv, num_heads=3, scale=0.2, batch=batch)

    together = run(attend, [q, k, v], whole_texts(LENGTHS))
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    for start, length in zip(starts, LENGTHS, strict=False):
        own = slice(start, start + length)
        np.testing.assert_array_equal(run(attend, [q[own], k[own], v[own]], whole_texts((length,))), together[own])


def test_threads_change_no_bit_of_the_attention() -> None:
    q, k, v = (random(sum(LENGTHS), 64, seed=seed) for seed in range(3))
    results = []
    for threads in (1, 3):
        kernels, run = native(variants()[0], threads)
        results.append(
            run(
                lambda batch, *qkv, own=kernels: own.encoder_attention(*qkv, num_heads=2, scale=0.2, batch=batch),
                [q, k, v],
                whole_texts(LENGTHS),
            )
        )
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_layer_norm_is_its_formula_over_the_row(device: tuple[Any, Run], width: int) -> None:
    kernels, run = device
    x, weight, bias = random(7, width) * 3 + 5, random(width, seed=1), random(width, seed=2)
    w, b = kernels.prepare_vector(weight), kernels.prepare_vector(bias)
    normed = run(lambda _, x: kernels.layer_norm(x, w, b, 1e-5), [x], whole_texts((7,)))
    wide = x.astype(np.float64)
    distance = wide - wide.mean(-1, keepdims=True)
    expected = distance / np.sqrt((distance**2).mean(-1, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(normed, expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("width", [5, 33])
def test_gelu_is_the_exact_one_and_tanh_is_tanh(device: tuple[Any, Run], width: int) -> None:
    kernels, run = device
    x = np.concatenate([random(width) * 4, np.linspace(-12, 12, 5 * width), [0.0] * width]).astype(np.float32)
    x = x.reshape(-1, width)
    expected = np.array([v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in x.ravel().tolist()]).reshape(x.shape)
    batch = whole_texts((len(x),))
    np.testing.assert_allclose(run(lambda _, x: kernels.gelu(x), [x], batch), expected, rtol=1e-6, atol=5e-7)
    np.testing.assert_allclose(run(lambda _, x: kernels.tanh(x), [x], batch), np.tanh(x.astype(float)), atol=3e-7)


def test_a_position_embedding_gives_the_rows_of_the_positions(device: tuple[Any, Run]) -> None:
    kernels, run = device
    values = random(40, 48)
    table = kernels.prepare_embedding(Weight((40, 48), values))
    positions = np.array([0, 39, 7, 7, 21])
    rows = run(lambda batch: kernels.position_embedding(table, batch), [], whole_texts((5,), positions))
    np.testing.assert_array_equal(rows, values[positions])


def test_what_is_no_number_stays_none(device: tuple[Any, Run]) -> None:
    kernels, run = device
    x = np.array([[1.0, np.nan, np.inf, -np.inf]], np.float32)
    gelu = run(lambda _, x: kernels.gelu(x), [x], whole_texts((1,)))[0]
    assert np.isnan(gelu[1]) and not np.isfinite(gelu[2])
