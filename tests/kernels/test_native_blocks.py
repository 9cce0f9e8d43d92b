"""The native kernels' KV cache: blocks are read, written and copied whole, and none before a window is looked at."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.kernels.native import NativeKernels, variants
from headrace.kernels.ops import Batch, KVCacheLayout

VARIANTS = variants()

BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 16, 80, 4, 2, 8, 500
Q, K, V = (
    np.random.default_rng(n).standard_normal((LENGTH, heads * HEAD_DIM), dtype=np.float32)
    for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
)


class Cached:
    """One sequence in blocks 0, 1, 2 ... of two groups, those of the second beginning at `second`."""

    def __init__(self, variant: str, window: int | None = None, second: int = 40, kv_cache_dtype: str = "auto") -> None:
        self.kernels = NativeKernels("float32", 2, variant=variant, kv_cache_dtype=kv_cache_dtype)
        self.kernels.allocate_kv_cache(KVCacheLayout(2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM))
        self.window, self.second = window, second

    def step(self, start: int, stop: int, group: int = 0, layer: int = 0) -> np.ndarray:
        positions = np.arange(start, stop, dtype=np.int32)
        first = np.array([[0], [self.second]], np.int32)
        batch = Batch(
            token_ids=np.zeros_like(positions),
            positions=positions,
            slot_mapping=first * BLOCK_SIZE + positions,
            query_start=np.array([0, stop - start], np.int32),
            seq_lens=np.array([stop], np.int32),
            block_tables=(first + np.arange(-(-stop // BLOCK_SIZE), dtype=np.int32))[:, None],
            sample_rows=np.zeros(0, np.int32),
        )

        def forward(handle: object, q: object, k: object, v: object) -> object:
            return self.kernels.attention(
                q, k, v, group=group, layer=layer, num_heads=HEADS, num_kv_heads=KV_HEADS, scale=0.3, batch=handle,
                window=self.window,
            )  # fmt: skip

        return self.kernels.evaluate(forward, [part[start:stop] for part in (Q, K, V)], batch)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [1, 17, 70, 130])
def test_blocks_before_the_window_may_be_others_by_now(variant: str, window: int) -> None:
    """Not-a-number in every block that the step's rows do not see leaves no trace."""
    for start, stop in ((499, 500), (300, 310), (260, 400), (255, 257)):
        clean, poisoned = Cached(variant, window), Cached(variant, window)
        for cached in (clean, poisoned):
            cached.step(0, start)
        before = list(range((start + 1 - window) // BLOCK_SIZE))
        content = poisoned.kernels.read_blocks(before)
        content.view(np.float32)[:] = np.nan
        poisoned.kernels.write_blocks(before, content)
        assert np.array_equal(clean.step(start, stop), poisoned.step(start, stop))


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "fp8_e4m3", "int8"])
def test_blocks_that_were_moved_out_and_back_elsewhere_are_the_same_prefix(kv_cache_dtype: str) -> None:
    """With all that belongs to them, scales too, of every layer."""
    cached = Cached(VARIANTS[-1], kv_cache_dtype=kv_cache_dtype)
    for layer in (0, 1):
        cached.step(0, 40, layer=layer)
    expected = [cached.step(40, 60, layer=layer) for layer in (0, 1)]
    content = cached.kernels.read_blocks([0, 1, 2])
    for i in (2, 0, 1):
        cached.kernels.write_blocks([cached.second + i], content[i : i + 1])
    for layer in (0, 1):
        assert np.array_equal(cached.step(40, 60, group=1, layer=layer), expected[layer])


def test_each_group_of_layers_has_slots_and_blocks_of_its_own() -> None:
    cached = Cached(VARIANTS[-1])
    expected = cached.step(0, 100)
    assert np.array_equal(cached.step(0, 100, group=1), expected)
    cached.kernels.write_blocks([0], cached.kernels.read_blocks([50]))
    assert np.array_equal(cached.step(99, 100, group=1), expected[99:])
    assert not np.array_equal(cached.step(99, 100), expected[99:])
