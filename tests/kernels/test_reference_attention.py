"""Paged attention against plain float64 attention, and the same bits for every batch and every chunking."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.kernels.ops import Batch, KVCacheLayout  # noqa: E402
from headrace.kernels.reference import ReferenceKernels  # noqa: E402

BLOCK_SIZE, NUM_BLOCKS = 16, 200


class Sequence:
    """Random queries, keys and values of one sequence, and the blocks it may use."""

    def __init__(self, length: int, heads: int, kv_heads: int, head_dim: int, blocks: np.ndarray, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length, self.heads, self.kv_heads, self.head_dim = length, heads, kv_heads, head_dim
        self.q = torch.randn(length, heads * head_dim, generator=generator)
        self.k = torch.randn(length, kv_heads * head_dim, generator=generator)
        self.v = torch.randn(length, kv_heads * head_dim, generator=generator)
        self.blocks = blocks[: -(-length // BLOCK_SIZE)]

    def exact(self) -> torch.Tensor:
        group = self.heads // self.kv_heads
        q, k, v = (t.view(self.length, -1, self.head_dim).transpose(0, 1).double() for t in (self.q, self.k, self.v))
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * self.head_dim**-0.5
        scores += torch.full((self.length, self.length), -torch.inf).triu(1)
        return (scores.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1).reshape(self.length, -1)


def kernels_for(sequence: Sequence, dtype: str = "float32") -> ReferenceKernels:
    kernels = ReferenceKernels("cpu", dtype)
    kernels.allocate_kv_cache(KVCacheLayout(1, NUM_BLOCKS, BLOCK_SIZE, sequence.kv_heads, sequence.head_dim))
    return kernels


def step(kernels: ReferenceKernels, parts: list[tuple[Sequence, int, int]]) -> list[torch.Tensor]:
    """Attention of one batch of parts (sequence, start, stop); the result of each."""
    counts = [stop - start for _, start, stop in parts]
    query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(start, stop) for _, start, stop in parts]).astype(np.int32)
    tables = np.zeros((len(parts), max(-(-stop // BLOCK_SIZE) for _, _, stop in parts)), np.int32)
    for row, (sequence, _, stop) in zip(tables, parts, strict=True):
        used = -(-stop // BLOCK_SIZE)
        row[:used] = sequence.blocks[:used]
    owner = np.repeat(np.arange(len(parts)), counts)
    slots = tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    batch = Batch(
        token_ids=np.zeros_like(positions),
        positions=positions,
        slot_mapping=slots.astype(np.int32)[None],
        query_start=query_start,
        seq_lens=np.array([stop for _, _, stop in parts], np.int32),
        block_tables=tables[None],
        sample_rows=query_start[1:] - 1,
    )
    first = parts[0][0]
    dtype = getattr(torch, kernels.dtype)
    q, k, v = (torch.cat([getattr(s, n)[a:b] for s, a, b in parts]).to(dtype) for n in "qkv")
    out = kernels.attention(
        q,
        k,
        v,
        group=0,
        layer=0,
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        scale=first.head_dim**-0.5,
        batch=kernels.load_batch(batch),
    )
    return list(out.split(counts))


def chunks(sequence: Sequence, sizes: list[int]) -> list[tuple[Sequence, int, int]]:
    stops = np.cumsum(sizes)
    assert stops[-1] == sequence.length
    return [(sequence, int(stop - size), int(stop)) for stop, size in zip(stops, sizes, strict=True)]


BLOCKS = np.random.default_rng(5).permutation(NUM_BLOCKS)


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "head_dim"),
    [(1, 4, 2, 16), (17, 3, 1, 10), (128, 9, 3, 64), (129, 2, 2, 64), (300, 8, 2, 32)],
)
def test_attention_equals_plain_softmax_attention(length: int, heads: int, kv_heads: int, head_dim: int) -> None:
    sequence = Sequence(length, heads, kv_heads, head_dim, BLOCKS, seed=length)
    (out,) = step(kernels_for(sequence), [(sequence, 0, length)])
    np.testing.assert_allclose(out.numpy(), sequence.exact().numpy(), atol=3e-6)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_attention_in_low_precision_rounds_only_inputs_cache_and_result(dtype: str, error: float) -> None:
    sequence = Sequence(150, 4, 2, 32, BLOCKS, seed=1)
    (out,) = step(kernels_for(sequence, dtype), [(sequence, 0, 150)])
    assert out.dtype == getattr(torch, dtype)
    np.testing.assert_allclose(out.double().numpy(), sequence.exact().numpy(), atol=error)


@pytest.mark.parametrize("sizes", [[7] * 42 + [6], [1] * 300, [300 - 33, 31, 1, 1], [100, 1, 99, 100], [33, 267]])
def test_every_chunking_gives_the_same_bits(sizes: list[int]) -> None:
    sequence = Sequence(300, 9, 3, 64, BLOCKS, seed=2)
    (whole,) = step(kernels_for(sequence), [(sequence, 0, 300)])
    kernels = kernels_for(sequence)
    parts = [step(kernels, [part])[0] for part in chunks(sequence, sizes)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_batch_of_chunks_and_decodes_gives_each_the_bits_it_has_alone() -> None:
    lengths = (1, 5, 40, 129, 140, 300)
    sequences = [Sequence(n, 6, 2, 32, BLOCKS[20 * i :], seed=i) for i, n in enumerate(lengths)]
    alone = [step(kernels_for(s), [(s, 0, s.length)])[0] for s in sequences]
    for last in (1, 3, 100):
        kernels = kernels_for(sequences[0])
        for sequence in sequences:
            if sequence.length > last:
                step(kernels, [(sequence, 0, sequence.length - last)])
        together = step(kernels, [(s, max(0, s.length - last), s.length) for s in reversed(sequences)])
        for sequence, whole, part in zip(sequences, alone, reversed(together), strict=True):
            assert torch.equal(part, whole[max(0, sequence.length - last) :])


def test_what_lies_beyond_a_sequences_end_is_never_read() -> None:
    """Not-a-number in every other slot of the cache leaves no trace, although whole tiles are read."""
    sequence = Sequence(37, 4, 2, 16, BLOCKS, seed=3)
    poisoned = kernels_for(sequence)
    poison = Sequence(BLOCK_SIZE * NUM_BLOCKS, 4, 2, 16, np.arange(NUM_BLOCKS), seed=4)
    poison.k[:] = torch.nan
    poison.v[:] = torch.nan
    step(poisoned, [(poison, poison.length - 1, poison.length)])
    for start in range(0, poison.length, 400):
        step(poisoned, [(poison, start, min(start + 400, poison.length))])
    (clean,) = step(kernels_for(sequence), [(sequence, 0, 37)])
    assert torch.equal(step(poisoned, [(sequence, 0, 37)])[0], clean)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_that_were_read_and_written_back_elsewhere_are_the_same_prefix(dtype: str) -> None:
    sequence = Sequence(60, 4, 2, 16, BLOCKS, seed=5)
    kernels = kernels_for(sequence, dtype)
    step(kernels, [(sequence, 0, 40)])
    (expected,) = step(kernels, [(sequence, 40, 60)])
    other = Sequence(60, 4, 2, 16, BLOCKS[50:], seed=5)
    content = kernels.read_blocks(sequence.blocks[:3].tolist())
    assert content.shape == (3, 2 * BLOCK_SIZE * 2 * 16 * torch.finfo(getattr(torch, dtype)).bits // 8)
    # In another order and one by one: each row is a whole block.
    for i in (2, 0, 1):
        kernels.write_blocks([int(other.blocks[i])], content[i : i + 1])
    assert torch.equal(step(kernels, [(other, 40, 60)])[0], expected)


def test_each_group_of_layers_has_slots_and_blocks_of_its_own() -> None:
    """Two groups of one batch: one layer's keys and values, at different places, are different caches."""
    first, second = (Sequence(50, 4, 2, 16, BLOCKS[start:], seed=start) for start in (0, 100))
    positions = np.arange(50)
    tables = np.stack([first.blocks, second.blocks])[:, None].astype(np.int32)
    slots = tables[:, 0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    batch = Batch(
        token_ids=np.zeros(50, np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slots.astype(np.int32),
        query_start=np.array([0, 50], np.int32),
        seq_lens=np.array([50], np.int32),
        block_tables=tables,
        sample_rows=np.array([49], np.int32),
    )
    kernels = kernels_for(first)
    loaded = kernels.load_batch(batch)
    for group, own in enumerate((first, second)):
        out = kernels.attention(
            own.q, own.k, own.v, group=group, layer=0, num_heads=4, num_kv_heads=2, scale=0.25, batch=loaded
        )
        np.testing.assert_allclose(out.numpy(), own.exact().numpy(), atol=3e-6)


def test_copied_blocks_are_the_same_prefix_elsewhere() -> None:
    sequence = Sequence(60, 4, 2, 16, BLOCKS, seed=5)
    kernels = kernels_for(sequence)
    step(kernels, [(sequence, 0, 40)])
    (expected,) = step(kernels, [(sequence, 40, 60)])
    fork = Sequence(60, 4, 2, 16, BLOCKS[50:], seed=5)
    kernels.copy_blocks([(int(a), int(b)) for a, b in zip(sequence.blocks[:3], fork.blocks[:3], strict=True)])
    assert torch.equal(step(kernels, [(fork, 40, 60)])[0], expected)
