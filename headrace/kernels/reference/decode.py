"""A step that sequences go on with, part after part: the twin of csrc/decode.cpp, and any forward and sampler."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.kernels.draws import uniforms
from headrace.kernels.ops import Batch, Buffer, DecodeState, SampledRows, SamplingRows

Step = Callable[[Batch], Buffer]
Sample = Callable[[Buffer, SamplingRows], SampledRows]


def advance(state: DecodeState) -> None:
    """The batch of the next tokens, and the numbers they are drawn with. ValueError where a block is missing."""
    batch, size = state.batch, state.block_size
    batch.token_ids[:] = state.chosen
    batch.positions[:] = batch.seq_lens
    batch.seq_lens[:] += 1
    columns = batch.positions // size
    if (columns >= state.num_blocks).any():
        raise ValueError("a sequence is to go on without a block for its token")
    blocks = np.take_along_axis(batch.block_tables, columns[None, :, None], axis=2)[:, :, 0]
    batch.slot_mapping[:] = blocks * size + batch.positions % size
    if state.rows is not None and state.streams is not None:
        state.rows.uniforms[:] = uniforms(state.streams.tolist(), batch.seq_lens.tolist())


class Decoder:
    """`kernels.ops.Decoder` by any forward and sampler."""

    def __init__(self, state: DecodeState, forward: Step, sample: Sample) -> None:
        self._state = state
        self._forward = forward
        self._sample = sample

    def advance(self) -> None:
        advance(self._state)

    def step(self) -> list[int]:
        state = self._state
        assert state.rows is not None
        advance(state)
        state.chosen[:] = self._sample(self._forward(state.batch), state.rows).token_ids
        return state.chosen.tolist()


class Eager:
    """`kernels.ops.Forward` without a recording."""

    def __init__(self, forward: Step, sample: Sample) -> None:
        self._forward = forward
        self._sample = sample

    def __call__(self, batch: Batch) -> Buffer:
        return self._forward(batch)

    def decoder(self, state: DecodeState) -> Decoder:
        return Decoder(state, self._forward, self._sample)
