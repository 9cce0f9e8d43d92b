"""Every plain operation against a float64 twin, and the promise that a row's bits do not depend on the others."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.kernels.ops import Batch, KVCacheLayout  # noqa: E402
from headrace.kernels.reference import ReferenceKernels  # noqa: E402
from headrace.kernels.weight import Weight  # noqa: E402

DTYPES = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}
"""Compute dtype and the relative error allowed, which covers one rounding of the result."""


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def buffer(values: np.ndarray, dtype: str = "float32") -> torch.Tensor:
    return torch.from_numpy(values).to(getattr(torch, dtype))


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


def rows_batch(positions: list[int], token_ids: list[int] | None = None, sample_rows: tuple[int, ...] = ()) -> Batch:
    """One row each of several sequences, at these positions."""
    at = np.array(positions, np.int32)
    return Batch(
        token_ids=np.array(token_ids or [0] * len(at), np.int32),
        positions=at,
        slot_mapping=np.zeros_like(at)[None],
        query_start=np.arange(len(at) + 1, dtype=np.int32),
        seq_lens=at + 1,
        block_tables=np.zeros((len(at), int(at.max()) + 1), np.int32)[None],
        sample_rows=np.array(sample_rows, np.int32),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 64, 96), (31, 13, 7), (32, 64, 33), (33, 100, 64), (70, 5, 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_the_product_plus_bias(dtype: str, rows: int, width: int, out: int, biased: bool) -> None:
    kernels = ReferenceKernels("cpu", dtype)
    x, w, b = buffer(random(rows, width), dtype), random(out, width, seed=1), random(out, seed=2)
    result = kernels.linear(
        x, kernels.prepare_weight(Weight(w.shape, w)), kernels.prepare_vector(b) if biased else None
    )
    expected = wide(x) @ wide(buffer(w, dtype)).T + (wide(buffer(b, dtype)) if biased else 0)
    assert result.dtype == x.dtype and result.shape == (rows, out)
    np.testing.assert_allclose(wide(result), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype] * width**0.5)


def test_linear_of_no_rows_is_empty() -> None:
    kernels = ReferenceKernels()
    matrix = kernels.prepare_weight(Weight((6, 4), random(6, 4)))
    assert kernels.linear(torch.empty(0, 4), matrix, None).shape == (0, 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("width", "out"), [(576, 960), (52, 77)])
def test_a_row_of_linear_has_the_same_bits_wherever_it_stands(dtype: str, width: int, out: int) -> None:
    kernels = ReferenceKernels("cpu", dtype)
    matrix = kernels.prepare_weight(Weight((out, width), random(out, width)))
    rows = buffer(random(75, width, seed=1), dtype)
    whole = kernels.linear(rows, matrix, None)
    for start, stop in ((0, 1), (1, 2), (5, 12), (30, 34), (31, 64), (74, 75), (40, 75)):
        assert torch.equal(kernels.linear(rows[start:stop], matrix, None), whole[start:stop])


def test_rows_of_norm_and_activation_have_the_same_bits_wherever_they_stand() -> None:
    """Sizes at which torch shares an operation among threads, with widths that no vector length divides."""
    kernels = ReferenceKernels()
    x, residual, weight = (buffer(random(*shape)) for shape in ((301, 602), (301, 602), (602,)))
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    gated = kernels.silu_mul(x)
    for start, stop in ((0, 1), (7, 8), (150, 152), (149, 250), (300, 301)):
        part = slice(start, stop)
        again = kernels.add_rms_norm(x[part], residual[part], weight, 1e-5)
        assert torch.equal(again[0], normed[part]) and torch.equal(again[1], total[part])
        assert torch.equal(kernels.silu_mul(x[part]), gated[part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activation_equal_their_formulas(dtype: str) -> None:
    kernels = ReferenceKernels("cpu", dtype)
    x, residual, weight = buffer(random(9, 34), dtype), buffer(random(9, 34, seed=1), dtype), random(34, seed=2)

    def norm(values: np.ndarray) -> np.ndarray:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * wide(buffer(weight, dtype))

    handle = kernels.prepare_vector(weight)
    close = {"rtol": DTYPES[dtype], "atol": DTYPES[dtype]}
    np.testing.assert_allclose(wide(kernels.rms_norm(x, handle, 1e-5)), norm(wide(x)), **close)
    normed, total = kernels.add_rms_norm(x, residual, handle, 1e-5)
    np.testing.assert_allclose(wide(total), wide(x) + wide(residual), **close)
    np.testing.assert_allclose(wide(normed), norm(wide(total)), **close)
    gate, up = wide(x)[:, :17], wide(x)[:, 17:]
    np.testing.assert_allclose(wide(kernels.silu_mul(x)), gate / (1 + np.exp(-gate)) * up, **close)
    np.testing.assert_allclose(wide(kernels.add(x, residual)), wide(x) + wide(residual), **close)


def test_the_activation_survives_extreme_gates() -> None:
    x = torch.tensor([[1e4, -1e4, 0.0, 2.0, 2.0, 2.0]])
    assert ReferenceKernels().silu_mul(x).tolist() == [[2e4, 0.0, 0.0]]


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rope_turns_the_pairs_of_each_heads_halves_by_the_rows_position(rotary_dim: int) -> None:
    kernels = ReferenceKernels()
    kernels.allocate_kv_cache(KVCacheLayout(1, 8, 1, 1, 16))
    angles = np.random.default_rng(3).uniform(0, 6, (50, rotary_dim // 2))
    table = kernels.prepare_rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    x, positions = random(4, 3 * 16), [0, 49, 7, 7]
    result = kernels.rope(buffer(x), table, 16, kernels.load_batch(rows_batch(positions)))
    expected = x.reshape(4, 3, 16).astype(complex)
    half = rotary_dim // 2
    pairs = expected[..., :half] + 1j * expected[..., half:rotary_dim]
    turned = pairs * np.exp(1j * angles[positions])[:, None, :]
    expected[..., :half], expected[..., half:rotary_dim] = turned.real, turned.imag
    np.testing.assert_allclose(wide(result), expected.real.reshape(4, 48), atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_gives_the_rows_of_the_tokens_from_dense_and_quantised_tables(dtype: str) -> None:
    kernels = ReferenceKernels("cpu", dtype)
    kernels.allocate_kv_cache(KVCacheLayout(1, 8, 1, 1, 16))
    dense = random(10, 32)
    q = np.random.default_rng(0).integers(-127, 128, (10, 32)).astype(np.int8)
    grouped = Weight((10, 32), q, bits=8, group_size=16, scales=np.abs(random(10, 2)))
    for weight in (Weight((10, 32), dense), grouped):
        batch = rows_batch([0, 0, 0], token_ids=[9, 0, 9])
        rows = kernels.embedding(kernels.prepare_embedding(weight), kernels.load_batch(batch))
        assert torch.equal(rows, buffer(weight.to_float32()[[9, 0, 9]], dtype))


def test_weight_bytes_counts_what_was_prepared() -> None:
    kernels = ReferenceKernels()
    kernels.prepare_weight(Weight((8, 4), random(8, 4)))
    kernels.prepare_vector(random(8))
    assert kernels.weight_bytes == 8 * 4 * 4 + 8 * 4


def test_split_and_sample_rows_pick_columns_and_rows() -> None:
    kernels = ReferenceKernels()
    kernels.allocate_kv_cache(KVCacheLayout(1, 8, 1, 1, 16))
    x = torch.arange(12.0).view(2, 6)
    assert [part.tolist() for part in kernels.split(x, (1, 5))] == [
        [[0.0], [6.0]],
        [[1.0, 2.0, 3.0, 4.0, 5.0], [7.0, 8.0, 9.0, 10.0, 11.0]],
    ]
    batch = kernels.load_batch(rows_batch([0, 0], sample_rows=(1,)))
    assert kernels.sample_rows(x, batch).tolist() == [x[1].tolist()]


def test_a_step_before_the_cache_is_allocated_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="allocate_kv_cache"):
        ReferenceKernels().load_batch(rows_batch([0])).plan(0, None)
