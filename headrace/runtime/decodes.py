"""The batch of a steady state: the same sequences, step after step, each computing the token it got last.

Nothing is built for such a step. The arrays of its batch, and of what the sampler is told, move on in place, a few
numbers a sequence; and they stay the same arrays, so that kernels need not look at more than which they are. Numbers
are written one by one: after a forward, which has swept the caches, numpy costs more than this for many sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from headrace.engine.plan import NO_BLOCK, SequenceStep
from headrace.kernels.ops import Batch
from headrace.runtime.choosing import Asked
from headrace.runtime.sampling import token_counts, uniform
from headrace.runtime.table import SequenceTable

SPARE_BLOCKS = 16
"""Columns of the block tables beyond those that are needed when the sequences come together."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of layers: `slots` [sequences] and `tables` [sequences, columns] of the batch, and what to add to a
    sequence's position for its slot while it stays in its block."""

    slots: memoryview
    tables: memoryview
    offsets: list[int]


class Decodes:
    """`rows` are the table's of the sequences, in the order of the batch."""

    def __init__(
        self, table: SequenceTable, rows: Sequence[int], steps: Sequence[SequenceStep], batch: Batch, block_size: int
    ) -> None:
        """`batch` is that of `steps`, each of which computes one token and samples."""
        self.rows = rows
        self.asked: Asked | None = None
        """What the sampler is asked, where that is the same for every step but for the draws."""
        self._table = table
        self._block_size = block_size
        self._seq_ids = [step.seq_id for step in steps]
        self._next = [step.start + 1 for step in steps]
        self._width = batch.block_tables.shape[2] + SPARE_BLOCKS
        wide = np.zeros((*batch.block_tables.shape[:2], self._width), np.int32)
        wide[:, :, : batch.block_tables.shape[2]] = batch.block_tables
        self.batch = replace(batch, block_tables=wide)
        self._token_ids, self._positions, self._seq_lens = (
            array.data for array in (batch.token_ids, batch.positions, batch.seq_lens)
        )
        self._groups = [
            _Group(slots.data, tables.data, (slots - batch.positions).tolist())
            for slots, tables in zip(batch.slot_mapping, wide, strict=True)
        ]
        self._uniforms: memoryview[float] = cast("memoryview[float]", memoryview(b""))
        self._streams: list[tuple[int, int]] = []
        self._counts = False

    def advance(self, steps: Sequence[SequenceStep]) -> bool:
        """Make `batch`, and the random numbers of `asked`, those of these steps, whose blocks are in the table. False
        if they are anything but the next tokens of the same sequences: this is then of no use any more."""
        if len(steps) != len(self._seq_ids):
            return False
        tokens, size, expected = self._table.token_view, self._block_size, self._next
        token_ids, positions, seq_lens = self._token_ids, self._positions, self._seq_lens
        for i, step in enumerate(steps):
            position = step.start
            if step.seq_id != self._seq_ids[i] or position != expected[i] or step.num_tokens != 1 or not step.samples:
                return False
            if position % size == 0 and not self._enter_block(i, position):
                return False
            token_ids[i] = tokens[self.rows[i], position]
            positions[i] = position
            seq_lens[i] = expected[i] = position + 1
            for group in self._groups:
                group.slots[i] = position + group.offsets[i]
        for i, stream in self._streams:
            self._uniforms[i] = uniform(stream, expected[i])
        if self._counts and self.asked is not None:
            self._count(self.asked)
        return True

    def _enter_block(self, i: int, position: int) -> bool:
        """Sequence `i` goes on in its next block. False if that is not there, or there is no column for it."""
        table, row, column = self._table, self.rows[i], position // self._block_size
        for g, group in enumerate(self._groups):
            if column >= min(self._width, table.num_blocks[g, row]) or table.blocks[g, row, column] == NO_BLOCK:
                return False
            block = int(table.blocks[g, row, column])
            group.tables[i, column] = block
            group.offsets[i] = block * self._block_size - position
        return True

    def _count(self, asked: Asked) -> None:
        """The tokens that came since."""
        tokens = [self._table.tokens[row, :length] for row, length in zip(self.rows, self._next, strict=True)]
        seen, generated = token_counts(asked.states, tokens)
        self.asked = replace(asked, rows=replace(asked.rows, seen=seen, generated=generated))

    def keep(self, asked: Asked) -> None:
        """Ask the same in the next steps, if it is `fixed`."""
        if not asked.fixed:
            return
        self._counts = any(state.seen is not None or state.generated is not None for state in asked.states)
        self.asked, self._uniforms = asked, cast("memoryview[float]", asked.rows.uniforms.data)
        self._streams = [(i, state.stream) for i, state in enumerate(asked.states) if state.params.temperature > 0]
