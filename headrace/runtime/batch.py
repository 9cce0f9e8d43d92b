"""From a plan's steps to the flat batch that kernels take.

Two sequences, blocks of 4 tokens: A computes positions 2..4 of its tokens, B computes position 6 and samples.

    token_ids     a2 a3 a4 b6        query_start  0 3 4
    positions      2  3  4  6        seq_lens     5 7
    slot_mapping  of block_table[position // 4] and position % 4, for each group of layers;  sample_rows  3
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.engine.plan import NO_BLOCK, SequenceStep
from headrace.kernels.ops import Batch
from headrace.runtime.table import SequenceTable


def build_batch(table: SequenceTable, rows: NDArray[np.int64], steps: Sequence[SequenceStep], block_size: int) -> Batch:
    """`rows[i]` is the table's row of `steps[i]`, whose new blocks are in the table already.

    Raises ValueError for a step beyond the sequence's tokens or blocks: the plan and the table disagree.
    """
    starts = np.fromiter((step.start for step in steps), np.int64, len(steps))
    counts = np.fromiter((step.num_tokens for step in steps), np.int64, len(steps))
    seq_lens = starts + counts
    num_blocks_of = table.num_blocks[:, rows]
    known = {"tokens": table.num_tokens[rows], "tokens of blocks": num_blocks_of.min(axis=0) * block_size}
    impossible = (seq_lens > np.minimum(*known.values())) | (counts < 1) | (starts < 0)
    if impossible.any():
        raise ValueError(_disagreement(steps, int(np.argmax(impossible)), known))
    query_start = np.zeros(len(steps) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    if query_start[-1] == len(steps):
        row_of_token, positions = rows, starts
    else:
        row_of_token = np.repeat(rows, counts)
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
    slots = table.blocks[:, row_of_token, positions // block_size] * block_size + positions % block_size
    if slots.min() < 0:
        raise ValueError("a step is to compute tokens before the window of a group of layers, where no block is")
    num_blocks = -(-int(seq_lens.max()) // block_size)
    block_tables = table.blocks[:, rows, :num_blocks]
    # A reused row has its last owner's blocks beyond its own, and where no block is, any number will do.
    block_tables[(np.arange(num_blocks) >= num_blocks_of[:, :, None]) | (block_tables == NO_BLOCK)] = 0
    samples = np.fromiter((step.samples for step in steps), bool, len(steps))
    sample_rows = query_start[1:][samples] - 1
    if any(step.num_scored for step in steps):
        scored = [np.arange(start, start + step.num_scored) for start, step in zip(query_start, steps, strict=False)]
        sample_rows = np.concatenate([sample_rows, *scored])
    return Batch(
        token_ids=table.tokens[row_of_token, positions],
        positions=positions.astype(np.int32),
        slot_mapping=np.ascontiguousarray(slots, np.int32),
        query_start=query_start.astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        block_tables=np.ascontiguousarray(block_tables),
        sample_rows=sample_rows.astype(np.int32),
    )


def _disagreement(steps: Sequence[SequenceStep], place: int, known: dict[str, NDArray[np.int64]]) -> str:
    step = steps[place]
    what = next((w for w, count in known.items() if step.start + step.num_tokens > count[place]), "tokens")
    return (
        f"sequence {step.seq_id} is to compute {step.num_tokens} tokens from {step.start}, "
        f"but has {known[what][place]} {what}"
    )
