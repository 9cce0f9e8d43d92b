"""The native operations on rows against their formulas, in every variant this CPU runs, and the promise that a row's
bits do not depend on the others, on their number or on the threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.kernels.native import NativeKernels, variants
from headrace.kernels.ops import Batch
from headrace.kernels.weight import Weight

VARIANTS = variants()

WIDTHS = [1, 5, 16, 17, 64, 100, 577]
ROWS = [1, 2, 33]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def rows_batch(positions: np.ndarray, sample_rows: tuple[int, ...] = ()) -> Batch:
    """One row each of several sequences, at these positions."""
    zeros = np.zeros(len(positions), np.int32)
    return Batch(
        token_ids=zeros,
        positions=positions.astype(np.int32),
        slot_mapping=zeros[None],
        query_start=np.arange(len(zeros) + 1, dtype=np.int32),
        seq_lens=positions.astype(np.int32) + 1,
        block_tables=np.zeros((1, len(zeros), 1), np.int32),
        sample_rows=np.array(sample_rows, np.int32),
    )


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(threads=1, variant=request.param)


def exact_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    parts = x.astype(np.float64).reshape(len(x), -1, len(weight))
    return (parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps) * weight).reshape(x.shape)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_is_its_formula_over_the_row_or_each_of_its_heads(kernels: NativeKernels, rows: int, width: int) -> None:
    for parts in (1, 3):
        x, weight = random(rows, parts * width), random(width, seed=1)
        handle = kernels.prepare_vector(weight)
        normed = kernels.evaluate(lambda _, x, handle=handle: kernels.rms_norm(x, handle, 1e-5), [x])
        np.testing.assert_allclose(normed, exact_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_with_a_residual_gives_the_sum_and_its_norm(kernels: NativeKernels, width: int) -> None:
    x, residual, weight = random(7, width), random(7, width, seed=1), random(width, seed=2)
    handle = kernels.prepare_vector(weight)
    both = [
        kernels.evaluate(lambda _, x, r, i=i: kernels.add_rms_norm(x, r, handle, 1e-5)[i], [x, residual])
        for i in (0, 1)
    ]
    np.testing.assert_array_equal(both[1], x + residual)
    np.testing.assert_allclose(both[0], exact_norm(x + residual, weight, 1e-5), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("half", "head_dim", "heads"), [(1, 2, 3), (8, 16, 1), (20, 46, 5), (32, 64, 9), (16, 64, 2)])
def test_rope_turns_the_pairs_of_every_head_and_leaves_the_rest(
    kernels: NativeKernels, half: int, head_dim: int, heads: int
) -> None:
    cos, sin = random(50, half), random(50, half, seed=1)
    x, positions = random(11, heads * head_dim, seed=2), np.random.default_rng(3).integers(0, 50, 11)
    table = kernels.prepare_rope(cos, sin)
    turned = kernels.evaluate(lambda batch, x: kernels.rope(x, table, head_dim, batch), [x], rows_batch(positions))
    expected = x.reshape(11, heads, head_dim).copy()
    first, second = expected[..., :half].copy(), expected[..., half : 2 * half].copy()
    c, s = cos[positions, None], sin[positions, None]
    expected[..., :half] = first * c - second * s
    expected[..., half : 2 * half] = second * c + first * s
    np.testing.assert_array_equal(turned, expected.reshape(x.shape))


@pytest.mark.parametrize("width", WIDTHS)
def test_gates_are_their_formulas(kernels: NativeKernels, width: int) -> None:
    for spread in (1, 30, 300):
        x = random(9, 2 * width) * spread
        gate, up = np.split(x.astype(np.float64), 2, axis=1)
        with np.errstate(over="ignore"):
            silu = gate / (1 + np.exp(-gate)) * up
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
        atol = 2e-7 * spread**2
        np.testing.assert_allclose(kernels.evaluate(lambda _, x: kernels.silu_mul(x), [x]), silu, rtol=2e-6, atol=atol)
        np.testing.assert_allclose(kernels.evaluate(lambda _, x: kernels.gelu_mul(x), [x]), gelu, rtol=2e-6, atol=atol)


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_multiples_and_picked_rows_are_exact(kernels: NativeKernels, width: int) -> None:
    a, b = random(9, width), random(9, width, seed=1)
    np.testing.assert_array_equal(kernels.evaluate(lambda _, a, b: kernels.add(a, b), [a, b]), a + b)
    np.testing.assert_array_equal(kernels.evaluate(lambda _, a: kernels.scale(a, 0.3), [a]), a * np.float32(0.3))
    batch = rows_batch(np.arange(9), (8, 0, 3, 3))
    picked = kernels.evaluate(lambda batch, a: kernels.sample_rows(a, batch), [a], batch)
    np.testing.assert_array_equal(picked, a[[8, 0, 3, 3]])


class Mixture:
    """Experts of odd sizes, by the kernels and by their formula."""

    def __init__(self, kernels: NativeKernels, experts: int, width: int, ffn: int) -> None:
        self.kernels = kernels
        self.gate_up = [random(2 * ffn, width, seed=e) / width**0.5 for e in range(experts)]
        self.down = [random(width, ffn, seed=100 + e) / ffn**0.5 for e in range(experts)]
        self.handles = [
            kernels.prepare_experts(Weight((w.shape[0], w.shape[1]), w) for w in weights)
            for weights in (self.gate_up, self.down)
        ]

    def __call__(self, x: np.ndarray, router: np.ndarray, top_k: int, normalize: bool) -> np.ndarray:
        def forward(_: Any, x: Any, router: Any) -> Any:
            return self.kernels.experts(x, router, *self.handles, top_k=top_k, normalize=normalize)

        return self.kernels.evaluate(forward, [x, router])

    def exact(self, x: np.ndarray, router: np.ndarray, top_k: int, normalize: bool) -> np.ndarray:
        out = np.zeros(x.shape, np.float64)
        for row, scores in enumerate(router.astype(np.float64)):
            weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            best = np.argsort(-weights, kind="stable")[:top_k]
            share = weights[best] / (weights[best].sum() if normalize else 1)
            for expert, weight in zip(best, share, strict=True):
                gate, up = np.split(self.gate_up[expert].astype(np.float64) @ x[row], 2)
                out[row] += weight * (self.down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        return out


@pytest.mark.parametrize(("experts", "top_k", "width", "ffn"), [(2, 1, 16, 8), (5, 5, 33, 20), (60, 8, 48, 17)])
def test_a_row_goes_through_its_heaviest_experts_of_equal_ones_the_first(
    kernels: NativeKernels, experts: int, top_k: int, width: int, ffn: int
) -> None:
    mixture = Mixture(kernels, experts, width, ffn)
    x, router = random(21, width, seed=1), random(21, experts, seed=2)
    for scores in (router, np.round(router), router * 0):
        for normalize in (False, True):
            out = mixture(x, scores, top_k, normalize)
            np.testing.assert_allclose(out, mixture.exact(x, scores, top_k, normalize), atol=1e-5)


def test_a_row_that_is_no_number_spoils_no_other(kernels: NativeKernels) -> None:
    x, router = random(6, 40), random(6, 5, seed=1)
    weight = kernels.prepare_vector(random(40, seed=2))
    mixture = Mixture(kernels, 5, 40, 12)
    spoilt, scores = x.copy(), router.copy()
    spoilt[3, 7] = scores[3, 1] = np.nan
    operations: list[Callable[[np.ndarray, np.ndarray], np.ndarray]] = [
        lambda x, _: kernels.evaluate(lambda _, x: kernels.rms_norm(x, weight, 1e-5), [x]),
        lambda x, _: kernels.evaluate(lambda _, x: kernels.silu_mul(x), [x]),
        lambda x, _: kernels.evaluate(lambda _, x: kernels.gelu_mul(x), [x]),
        lambda x, router: mixture(x, router, 2, True),
    ]
    for operation in operations:
        with_it, without = operation(spoilt, scores), operation(x, router)
        assert np.isnan(with_it[3]).any()
        np.testing.assert_array_equal(np.delete(with_it, 3, 0), np.delete(without, 3, 0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_has_the_same_bits_alone_and_among_others_with_any_number_of_threads(variant: str) -> None:
    """Enough values that the pool is woken, and widths that no vector length divides."""
    x, residual, router = random(150, 602), random(150, 602, seed=1), random(150, 7, seed=2)
    positions = np.arange(150)
    cos, sin = random(150, 20), random(150, 20, seed=3)

    def outcomes(threads: int, start: int, end: int) -> list[np.ndarray]:
        kernels = NativeKernels(threads=threads, variant=variant)
        weight = kernels.prepare_vector(random(602, seed=4))
        table = kernels.prepare_rope(cos, sin)
        mixture = Mixture(kernels, 7, 602, 12)
        part, rest = x[start:end], residual[start:end]
        batch = rows_batch(positions[start:end])
        forwards: list[tuple[Any, list[np.ndarray]]] = [
            (lambda _, x, r: kernels.add_rms_norm(x, r, weight, 1e-5)[0], [part, rest]),
            (lambda _, x: kernels.silu_mul(x), [part]),
            (lambda _, x: kernels.gelu_mul(x), [part]),
            (lambda batch, x: kernels.rope(x, table, 43, batch), [part]),
            (lambda _, x: kernels.scale(x, 1.7), [part]),
        ]
        results = [kernels.evaluate(forward, inputs, batch) for forward, inputs in forwards]
        return [*results, mixture(part, router[start:end], 2, True)]

    whole = outcomes(1, 0, 150)
    for threads, start, end in ((2, 0, 150), (3, 0, 150), (1, 4, 5), (3, 31, 149)):
        for part, all_rows in zip(outcomes(threads, start, end), whole, strict=True):
            np.testing.assert_array_equal(part, all_rows[start:end])
