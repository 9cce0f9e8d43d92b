"""Attention with a window: what a row sees, whatever its chunk, and the same bits whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.kernels.ops import Batch, KVCacheLayout  # noqa: E402
from headrace.kernels.reference import ReferenceKernels  # noqa: E402
from headrace.kernels.reference.attention import KEY_TILE, plan_attention  # noqa: E402

BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 16, 120, 4, 2, 8, 500
Part = tuple[int, int, int]
"""(first block of the sequence, start, stop)."""


@pytest.fixture(scope="module")
def tensors() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(LENGTH, n * HEAD_DIM, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))


def batch_of(parts: list[Part]) -> Batch:
    counts = np.array([stop - start for _, start, stop in parts])
    positions = np.concatenate([np.arange(start, stop) for _, start, stop in parts])
    longest = max(-(-stop // BLOCK_SIZE) for _, _, stop in parts)
    query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=(np.repeat([b for b, *_ in parts], counts) * BLOCK_SIZE + positions).astype(np.int32)[None],
        query_start=query_start,
        seq_lens=np.array([stop for *_, stop in parts], np.int32),
        block_tables=np.array([np.arange(b, b + longest) for b, *_ in parts], np.int32)[None],
        sample_rows=query_start[1:] - 1,
    )


class Windowed:
    def __init__(self, tensors: tuple[torch.Tensor, ...], window: int | None) -> None:
        self.tensors, self.window = tensors, window
        self.kernels = ReferenceKernels()
        self.kernels.allocate_kv_cache(KVCacheLayout(1, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM))

    def step(self, *parts: Part) -> list[torch.Tensor]:
        q, k, v = (torch.cat([t[start:stop] for _, start, stop in parts]) for t in self.tensors)
        out = self.kernels.attention(
            q,
            k,
            v,
            group=0,
            layer=0,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            scale=HEAD_DIM**-0.5,
            batch=self.kernels.load_batch(batch_of(list(parts))),
            window=self.window,
        )
        return list(out.split([stop - start for _, start, stop in parts]))


def exact(tensors: tuple[torch.Tensor, ...], window: int) -> torch.Tensor:
    q, k, v = (t.view(LENGTH, -1, HEAD_DIM).transpose(0, 1).double() for t in tensors)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 0) for t in (k, v))
    before = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]
    scores = (q @ k.transpose(1, 2) * HEAD_DIM**-0.5).masked_fill((before < 0) | (before >= window), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(LENGTH, -1)


@pytest.mark.parametrize("window", [1, 3, 8, 100, 128, 129, 300, 499, 5000])
def test_a_row_sees_its_window_and_no_more(tensors: tuple[torch.Tensor, ...], window: int) -> None:
    (whole,) = Windowed(tensors, window).step((0, 0, LENGTH))
    torch.testing.assert_close(whole.double(), exact(tensors, window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 100, 129, 300])
def test_a_row_has_the_same_bits_in_any_chunk_and_beside_any_others(
    tensors: tuple[torch.Tensor, ...], window: int
) -> None:
    (whole,) = Windowed(tensors, window).step((0, 0, LENGTH))
    for sizes in ([1] * 40 + [460], [7] * 71 + [3], [200, 8, 33, 9, 250]):
        chunked, stops = Windowed(tensors, window), np.cumsum(sizes)
        parts = [chunked.step((40, int(b) - a, int(b)))[0] for a, b in zip(sizes, stops, strict=True)]
        assert torch.equal(torch.cat(parts), whole)
    served = Windowed(tensors, window)
    served.step((0, 0, 480), (40, 0, 3), (80, 0, 170))
    together = served.step((0, 480, 500), (40, 3, 300), (80, 170, 171))
    assert all(
        torch.equal(part, whole[a:b]) for part, (a, b) in zip(together, ((480, 500), (3, 300), (170, 171)), strict=True)
    )


def test_a_window_that_holds_everything_is_no_window(tensors: tuple[torch.Tensor, ...]) -> None:
    for parts in ([(0, 0, LENGTH)], [(0, 0, 9), (40, 0, 130)]):
        full, windowed = Windowed(tensors, None).step(*parts), Windowed(tensors, LENGTH).step(*parts)
        assert all(torch.equal(a, b) for a, b in zip(full, windowed, strict=True))


def test_blocks_before_the_window_may_be_others_by_now(tensors: tuple[torch.Tensor, ...]) -> None:
    """Not-a-number in every block that the step's rows do not see leaves no trace, although whole tiles are read."""
    window = 70
    for start, stop in ((499, 500), (300, 310), (260, 400)):
        clean, poisoned = Windowed(tensors, window), Windowed(tensors, window)
        for windowed in (clean, poisoned):
            windowed.step((0, 0, start))
        before = range((start + 1 - window) // BLOCK_SIZE)
        content = poisoned.kernels.read_blocks(before)
        content.view(np.float32)[:] = np.nan
        poisoned.kernels.write_blocks(before, content)
        (expected,), (got,) = clean.step((0, start, stop)), poisoned.step((0, start, stop))
        assert torch.equal(got, expected)


def test_key_tiles_outside_the_window_are_not_read() -> None:
    def keys_read(window: int | None, *parts: Part) -> int:
        plan = plan_attention(
            batch_of(list(parts)),
            num_kv_heads=1,
            block_size=BLOCK_SIZE,
            empty_slot=NUM_BLOCKS * BLOCK_SIZE,
            device="cpu",
            window=window,
        )
        return sum(tile.rows.numel() for group in plan.groups for tile in group.key_tiles) // KEY_TILE

    decode = (0, 499, 500)
    assert (keys_read(None, decode), keys_read(130, decode), keys_read(100, decode)) == (4, 2, 1)
    assert keys_read(50, decode, (40, 0, 1)) == 1 + 1
    long_chunk = (0, 256, 500)
    assert (keys_read(None, long_chunk), keys_read(8, long_chunk)) == (4, 3)
