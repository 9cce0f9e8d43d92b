"""The batch of a steady state: the same sequences, step after step, each computing the token it got last.

Nothing is built for such a step. The arrays of its batch, and of what the sampler is told, stay the same and move on
in place, which kernels can do as part of the step (`kernels.ops.DecodeState`). What is left to do here is to write new
blocks to the batch, and to count tokens where penalties need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.engine.plan import NO_BLOCK, SequenceStep
from headrace.kernels.ops import Batch, DecodeState, Forward, Kernels, SampledRows
from headrace.runtime.choosing import Asked, ask
from headrace.runtime.sampling import token_counts
from headrace.runtime.table import SequenceTable

SPARE_BLOCKS = 16
"""Columns of the block tables beyond those that are needed when the sequences come together."""


class Decodes:
    """After a step that went well, each of whose sequences computed one token and chose the next.

    `plain`: nothing but tokens is asked for, and always in the same way. Then `step` does it all, and the table learns
    of the tokens by `leave`; otherwise `choose` does, with the table up to date.
    """

    def __init__(
        self,
        table: SequenceTable,
        batch: Batch,
        asked: Asked,
        token_ids: NDArray[np.int32],
        block_size: int,
        forward: Forward,
        vocab_size: int,
    ) -> None:
        """`batch` is the step's, `asked` what its sampler was, `token_ids` what it chose."""
        self._table = table
        self._asked = asked
        self._forward = forward
        self._vocab_size = vocab_size
        self._width = batch.block_tables.shape[2] + SPARE_BLOCKS
        tables = np.zeros((*batch.block_tables.shape[:2], self._width), np.int32)
        tables[:, :, : batch.block_tables.shape[2]] = batch.block_tables
        num_blocks = np.ascontiguousarray(table.num_blocks[:, asked.table_rows], np.int32)
        self._tables, self._num_blocks = tables.data, num_blocks.data
        self._counts = any(state.seen is not None or state.generated is not None for state in asked.states)
        self.plain = asked.fixed and not self._counts and asked.rows.num_logprobs is None
        streams = None
        if any(state.params.temperature > 0 for state in asked.states):
            streams = np.array([state.stream for state in asked.states], np.uint64)
        self._batch = replace(batch, block_tables=tables)
        self._chosen = token_ids.copy()
        rows = asked.rows if asked.fixed else None
        self._decoder = forward.decoder(DecodeState(self._batch, num_blocks, block_size, self._chosen, rows, streams))
        self._steps: list[list[int]] = []
        """The tokens of each that the table does not have yet."""
        self._growing: list[tuple[int, tuple[tuple[int, ...], ...]]] = []
        self._grown: list[tuple[int, tuple[tuple[int, ...], ...]]] = []
        """Places and new blocks: of the next step, and those that the table does not have yet."""

    @property
    def seq_ids(self) -> Sequence[int]:
        """In the order of the batch."""
        return self._asked.seq_ids

    def grow(self, steps: Sequence[SequenceStep]) -> bool:
        """Take in the new blocks of the steps to come next. False if there is no room for them, or they are none: this
        is then of no use any more."""
        self._growing = []
        for place, step in enumerate(steps):
            if any(step.new_block_ids):
                self._growing.append((place, step.new_block_ids))
                for group, own in enumerate(step.new_block_ids):
                    for block_id in own:
                        column = self._num_blocks[group, place]
                        if column == self._width or block_id == NO_BLOCK:
                            return False
                        self._tables[group, place, column] = block_id
                        self._num_blocks[group, place] = column + 1
        return True

    def step(self) -> list[int]:
        """Compute and choose the next token of each sequence."""
        token_ids = self._decoder.step()
        self._steps.append(token_ids)
        self._grown += self._growing
        return token_ids

    def leave(self) -> None:
        """The table learns of the tokens and blocks; whatever comes now is built from it."""
        rows = self._asked.table_rows
        for place, block_ids in self._grown:
            self._table.append_blocks(rows[place], block_ids)
        if self._steps:
            self._table.append_steps(rows, self._steps)
        self._steps, self._grown = [], []

    def choose(self, kernels: Kernels) -> tuple[Asked, SampledRows]:
        """Compute the next token of each sequence and have it chosen: what was asked, and the answer."""
        self._decoder.advance()
        asked = self._asked_now()
        chosen = kernels.sample(self._forward(self._batch), asked.rows)
        self._chosen[:] = chosen.token_ids
        self._grown += self._growing
        return asked, chosen

    def _asked_now(self) -> Asked:
        asked, table = self._asked, self._table
        if not asked.fixed:
            return ask(table, list(zip(asked.seq_ids, asked.table_rows, strict=True)), (), self._vocab_size)
        if not self._counts:
            return asked
        tokens = [table.tokens[row, : table.num_tokens[row]] for row in asked.table_rows]
        seen, generated = token_counts(asked.states, tokens)
        return replace(asked, rows=replace(asked.rows, seen=seen, generated=generated))
