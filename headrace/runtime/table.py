"""The runtime's memory of sequences: one row each, kept between steps, so that a step only says what is new.

A row holds the tokens, a block table for each group of layers and the sampling parameters. Arrays grow by doubling,
in rows and in columns, and a dropped sequence's row is given to the next new one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.engine.plan import NewSequence
from headrace.runtime.grammar import GrammarState
from headrace.runtime.sampling import SequenceSampling

FIRST_ROWS = 16
FIRST_TOKENS = 256
FIRST_BLOCKS = 16


class SequenceTable:
    """`tokens` [rows, columns] int32 and `num_tokens` [rows]; `blocks` [groups, rows, columns] int32 and `num_blocks`
    [groups, rows]."""

    def __init__(self, num_groups: int = 1) -> None:
        self.tokens: NDArray[np.int32] = np.zeros((FIRST_ROWS, FIRST_TOKENS), np.int32)
        self.num_tokens: NDArray[np.int64] = np.zeros(FIRST_ROWS, np.int64)
        self.token_view = self.tokens.data
        """The same tokens, for a few of them at a time: numpy takes far longer to be asked for one."""
        self._count_view = self.num_tokens.data
        self._columns = FIRST_TOKENS
        self.blocks: NDArray[np.int32] = np.zeros((num_groups, FIRST_ROWS, FIRST_BLOCKS), np.int32)
        self.num_blocks: NDArray[np.int64] = np.zeros((num_groups, FIRST_ROWS), np.int64)
        self.sampling: list[SequenceSampling | None] = [None] * FIRST_ROWS
        self._rows: dict[int, int] = {}
        self._free = list(range(FIRST_ROWS - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def row(self, seq_id: int) -> int:
        """KeyError for a sequence that was never added or was dropped."""
        try:
            return self._rows[seq_id]
        except KeyError:
            raise KeyError(f"sequence {seq_id} is not in the runtime's table of {len(self)}") from None

    def add(self, sequence: NewSequence, grammar: GrammarState | None = None) -> None:
        """Give the sequence a row. One that is there already starts afresh."""
        self.drop(sequence.seq_id)
        if not self._free:
            self._grow_rows()
        row = self._free.pop()
        self._rows[sequence.seq_id] = row
        count = len(sequence.token_ids)
        self._reserve_tokens(count + 1)
        self.tokens[row, :count] = sequence.token_ids
        self.num_tokens[row] = count
        self.num_blocks[:, row] = 0
        self.sampling[row] = SequenceSampling.of(sequence, grammar)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence; one that is not there (its first step failed) is no error."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self.sampling[row] = None
            self._free.append(row)

    def append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """`block_ids` of each group."""
        for group, own in enumerate(block_ids):
            if not own:
                continue
            start = int(self.num_blocks[group, row])
            stop = start + len(own)
            self.blocks = _widened(self.blocks, stop)
            self.blocks[group, row, start:stop] = own
            self.num_blocks[group, row] = stop

    def append_tokens(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """One token to each row. There is room: every row has it for one more token than it holds."""
        counts, columns = self._count_view, self._columns
        full = False
        for row, token_id in zip(rows, token_ids, strict=True):
            place = counts[row]
            self.token_view[row, place] = token_id
            counts[row] = place + 1
            full = full or place + 2 > columns
        if full:
            self._reserve_tokens(columns + 1)

    def append_steps(self, rows: Sequence[int], steps: Sequence[Sequence[int]]) -> None:
        """To each row a token of each step."""
        counts, columns = self.num_tokens[rows], np.arange(len(steps))
        self._reserve_tokens(int(counts.max()) + len(steps) + 1)
        self.tokens[np.array(rows)[:, None], counts[:, None] + columns] = np.array(steps, np.int32).T
        self.num_tokens[rows] = counts + len(steps)

    def _reserve_tokens(self, columns: int) -> None:
        self.tokens = _widened(self.tokens, columns)
        self.token_view, self._columns = self.tokens.data, self.tokens.shape[1]

    def _grow_rows(self) -> None:
        rows = len(self.sampling)
        self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)], axis=1)
        self.num_tokens = np.concatenate([self.num_tokens, np.zeros_like(self.num_tokens)])
        self.token_view, self._count_view = self.tokens.data, self.num_tokens.data
        self.num_blocks = np.concatenate([self.num_blocks, np.zeros_like(self.num_blocks)], axis=1)
        self.sampling.extend([None] * rows)
        self._free = list(range(2 * rows - 1, rows - 1, -1))


def _widened(array: NDArray[np.int32], columns: int) -> NDArray[np.int32]:
    """The array itself, or a copy with at least twice its columns where it is too narrow."""
    if columns <= array.shape[-1]:
        return array
    wide = np.zeros((*array.shape[:-1], max(columns, 2 * array.shape[-1])), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide
