"""Native paged attention against float64 over what the cache holds, in every variant this CPU runs: types of the cache,
shapes, windows; the same bits for every batch, chunking and number of threads; and what a row must not see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.config.kv_cache_format import KV_CACHE_FORMATS  # noqa: E402
from headrace.kernels.native import NativeKernels, variants  # noqa: E402
from headrace.kernels.ops import Batch, KVCacheLayout  # noqa: E402

VARIANTS = variants()

DTYPES = tuple(KV_CACHE_FORMATS)
NUM_LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Shape:
    kv_heads: int
    shared: int
    head_dim: int
    block_size: int
    window: int | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.shared


PLAIN = Shape(2, 3, 64, 32)
SHAPES = [
    PLAIN,
    Shape(1, 1, 64, 16),
    Shape(2, 2, 80, 128, window=100),
    Shape(1, 7, 96, 32),
    Shape(1, 8, 128, 16, window=33),
    Shape(1, 4, 256, 48),
    Shape(2, 1, 20, 32),
    Shape(1, 2, 33, 1),
    Shape(2, 5, 16, 8, window=7),
    Shape(1, 3, 8, 24, window=300),
]


class Prefix:
    """Random queries, keys and values of one sequence, and the blocks it owns."""

    def __init__(self, length: int, shape: Shape, blocks: np.ndarray, seed: int = 0) -> None:
        random = np.random.default_rng([seed, length])
        self.length, self.shape = length, shape
        self.q = random.standard_normal((length, shape.heads * shape.head_dim), np.float32)
        self.k = random.standard_normal((length, shape.kv_heads * shape.head_dim), np.float32)
        self.v = random.standard_normal((length, shape.kv_heads * shape.head_dim), np.float32)
        self.blocks = blocks[: -(-length // shape.block_size)].astype(np.int32)

    def exact(self, kv_cache_dtype: str, position: int) -> np.ndarray:
        """Of one row, over keys and values as the cache holds them."""
        shape = self.shape
        start = 0 if shape.window is None else max(0, position + 1 - shape.window)
        k, v = (
            held(x[start : position + 1].reshape(-1, shape.kv_heads, shape.head_dim), kv_cache_dtype)
            .repeat_interleave(shape.shared, 1)
            .transpose(0, 1)
            for x in (self.k, self.v)
        )
        q = torch.from_numpy(self.q[position]).double().view(shape.heads, 1, shape.head_dim)
        scores = q @ k.transpose(1, 2) * shape.head_dim**-0.5
        return (scores.softmax(-1) @ v).reshape(-1).numpy()


def held(x: np.ndarray, kv_cache_dtype: str) -> torch.Tensor:
    """What a cache of this type gives back."""
    values, largest = torch.from_numpy(x), KV_CACHE_FORMATS[kv_cache_dtype].largest
    if largest is None:
        return values.to(getattr(torch, kv_cache_dtype)).double()
    scales = values.abs().amax(-1, keepdim=True) / largest
    codes = values / scales
    forms = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    codes = codes.round() if kv_cache_dtype == "int8" else codes.to(forms[kv_cache_dtype])
    return codes.double() * scales.double()


def kernels_for(
    shape: Shape, variant: str, kv_cache_dtype: str = "float32", threads: int = 1, num_blocks: int = 64
) -> NativeKernels:
    """A cache that somebody else's broken request has filled with NaN."""
    kernels = NativeKernels(threads=threads, kv_cache_dtype=kv_cache_dtype, variant=variant)
    kernels.allocate_kv_cache(KVCacheLayout(NUM_LAYERS, num_blocks, shape.block_size, shape.kv_heads, shape.head_dim))
    blocks = kernels.read_blocks(range(num_blocks))
    kernels.write_blocks(range(num_blocks), np.full_like(blocks, 0xFF))
    return kernels


def attend(kernels: NativeKernels, parts: Sequence[tuple[Prefix, int, int]]) -> list[np.ndarray]:
    """Attention of one batch of parts (sequence, start, stop); the rows of each."""
    shape = parts[0][0].shape
    size, window = shape.block_size, shape.window
    counts = [stop - start for _, start, stop in parts]
    query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(start, stop) for _, start, stop in parts])
    tables = np.zeros((len(parts), max(-(-stop // size) for _, _, stop in parts)), np.int32)
    for row, (prefix, start, stop) in zip(tables, parts, strict=True):
        used = -(-stop // size)
        row[:used] = prefix.blocks[:used]
        if window is not None:
            # Blocks before everything these rows see are somebody else's by now.
            row[: max(0, start + 1 - window) // size] = 63
    owner = np.repeat(np.arange(len(parts)), counts)
    batch = Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=(tables[owner, positions // size] * size + positions % size).astype(np.int32)[None],
        query_start=query_start,
        seq_lens=np.array([stop for _, _, stop in parts], np.int32),
        block_tables=tables[None],
        sample_rows=query_start[1:] - 1,
    )
    inputs = [np.concatenate([getattr(p, name)[start:stop] for p, start, stop in parts]) for name in "qkv"]

    def forward(batch: object, q: object, k: object, v: object) -> object:
        return kernels.attention(
            q, k, v, layer=LAYER, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
            scale=shape.head_dim**-0.5, batch=batch, window=window,
        )  # fmt: skip

    return np.split(kernels.evaluate(forward, inputs, batch), query_start[1:-1])


def in_chunks(kernels: NativeKernels, prefix: Prefix, stops: Iterable[int]) -> np.ndarray:
    rows, start = [], 0
    for stop in stops:
        rows += attend(kernels, [(prefix, start, stop)])
        start = stop
    return np.concatenate(rows)


def owned(shape: Shape, *lengths: int, seed: int = 0) -> list[Prefix]:
    """Sequences whose blocks lie anywhere in the cache, but in the last."""
    total = sum(-(-length // shape.block_size) for length in lengths)
    order = np.random.default_rng(seed).permutation(max(63, total))
    prefixes, taken = [], 0
    for index, length in enumerate(lengths):
        prefixes.append(Prefix(length, shape, order[taken:], index))
        taken += -(-length // shape.block_size)
    return prefixes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_cache_dtype", DTYPES)
def test_attention_is_exact_over_what_the_cache_holds(variant: str, kv_cache_dtype: str) -> None:
    for shape in SHAPES:
        lengths = (40, 21) if shape.block_size == 1 else (300, 40, 1)
        prefixes = owned(shape, *lengths)
        rows = attend(kernels_for(shape, variant, kv_cache_dtype), [(p, 0, p.length) for p in prefixes])
        for prefix, got in zip(prefixes, rows, strict=True):
            for position in {0, prefix.length // 2, prefix.length - 1}:
                expected = prefix.exact(kv_cache_dtype, position)
                np.testing.assert_allclose(got[position], expected, atol=3e-6, rtol=1e-5, err_msg=str(shape))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_cache_dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch_and_chunking_and_with_any_threads(
    variant: str, kv_cache_dtype: str
) -> None:
    for shape in (PLAIN, Shape(2, 2, 20, 16, window=40), Shape(1, 6, 128, 24)):
        prefix, *others = owned(shape, 560, 33, 100)
        whole = attend(kernels_for(shape, variant, kv_cache_dtype), [(prefix, 0, 560)])[0]
        for threads, stops in ((1, (1, 2, 17, 255, 258, 559, 560)), (2, (3, 300, 512, 560)), (3, (559, 560))):
            kernels = kernels_for(shape, variant, kv_cache_dtype, threads)
            np.testing.assert_array_equal(in_chunks(kernels, prefix, stops), whole)
        kernels = kernels_for(shape, variant, kv_cache_dtype, threads=3)
        together = attend(kernels, [(others[0], 0, 33), (prefix, 0, 500), (others[1], 0, 99)])
        np.testing.assert_array_equal(together[1], whole[:500])
        together = attend(kernels, [(others[1], 99, 100), (prefix, 500, 560)])
        np.testing.assert_array_equal(together[1], whole[500:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_long_row_split_over_threads_has_the_bits_of_a_walk(variant: str) -> None:
    shape = Shape(1, 3, 64, 32)
    (prefix,) = owned(shape, 1500)
    expected = None
    for threads in (1, 2, 3):
        kernels = kernels_for(shape, variant, "bfloat16", threads)
        attend(kernels, [(prefix, 0, 1499)])
        row = attend(kernels, [(prefix, 1499, 1500)])[0]
        expected = row if expected is None else expected
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8", "fp8_e4m3"])
def test_what_is_not_a_number_stays_with_the_rows_that_see_it(variant: str, kv_cache_dtype: str) -> None:
    (prefix,) = owned(PLAIN, 80)
    clean = attend(kernels_for(PLAIN, variant, kv_cache_dtype), [(prefix, 0, 80)])[0]
    prefix.q[41, 5], prefix.k[50, 3], prefix.v[60, 70] = np.nan, np.nan, np.nan
    rows = attend(kernels_for(PLAIN, variant, kv_cache_dtype), [(prefix, 0, 80)])[0]
    by_head = rows.reshape(80, PLAIN.heads, PLAIN.head_dim)
    assert np.isnan(by_head[41, 0]).all() and np.isfinite(by_head[41, 1:]).all()
    np.testing.assert_array_equal(np.delete(rows, 41, 0)[:49], np.delete(clean, 41, 0)[:49])
    assert np.isnan(by_head[50:, : PLAIN.shared]).all(), "the key of the first KV head"
    assert np.isfinite(by_head[:60, PLAIN.shared :]).all()
    assert np.isnan(by_head[60:, PLAIN.shared :]).any(-1).all(), "the value of the second"


@pytest.mark.parametrize("kv_cache_dtype", DTYPES)
def test_a_head_of_zeros_is_stored_as_zeros(kv_cache_dtype: str) -> None:
    (prefix,) = owned(PLAIN, 5)
    prefix.k[:], prefix.v[:] = 0, 0
    assert not attend(kernels_for(PLAIN, VARIANTS[0], kv_cache_dtype), [(prefix, 0, 5)])[0].any()


@pytest.mark.parametrize("kv_cache_dtype", DTYPES)
def test_copied_and_moved_blocks_are_the_same_prefix(kv_cache_dtype: str) -> None:
    (prefix,) = owned(PLAIN, 90)
    kernels = kernels_for(PLAIN, VARIANTS[0], kv_cache_dtype)
    attend(kernels, [(prefix, 0, 90)])
    expected = attend(kernels, [(prefix, 89, 90)])[0]
    first, second, third = prefix.blocks.tolist()
    free = next(b for b in range(63) if b not in prefix.blocks)
    # A ring: every source is read before any target is written.
    kernels.copy_blocks([(first, second), (second, third), (third, first)])
    prefix.blocks[:] = second, third, first
    np.testing.assert_array_equal(attend(kernels, [(prefix, 89, 90)])[0], expected)
    kernels.copy_blocks([(second, free)])
    prefix.blocks[0] = free
    np.testing.assert_array_equal(attend(kernels, [(prefix, 89, 90)])[0], expected)
    content = kernels.read_blocks(prefix.blocks.tolist())
    per_token = 2 * NUM_LAYERS * PLAIN.kv_heads * KV_CACHE_FORMATS[kv_cache_dtype].head_bytes(PLAIN.head_dim)
    assert content.shape == (3, per_token * PLAIN.block_size)
    other = kernels_for(PLAIN, VARIANTS[0], kv_cache_dtype)
    other.write_blocks([7, 8, 9], content)
    prefix.blocks[:] = 7, 8, 9
    np.testing.assert_array_equal(attend(other, [(prefix, 89, 90)])[0], expected)


def test_a_cache_takes_memory_as_it_is_written_to() -> None:
    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    shape = Shape(3, 3, 64, 32)
    kernels = NativeKernels(threads=1, kv_cache_dtype="bfloat16", variant=VARIANTS[0])
    before = resident_mib()
    kernels.allocate_kv_cache(KVCacheLayout(30, 5000, shape.block_size, shape.kv_heads, shape.head_dim))
    assert resident_mib() - before < 1, "3.4 GiB are mapped, none is touched"
    content = np.ones((20, kernels.read_blocks([0]).shape[1]), np.uint8)
    before = resident_mib()
    kernels.write_blocks(range(20), content)
    assert resident_mib() - before < content.nbytes / 2**20 + 6
