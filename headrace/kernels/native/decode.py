"""A captured forward, and steps that sequences go on with: their batch, the forward and the choice in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.kernels.native import library
from headrace.kernels.native.library import address
from headrace.kernels.native.program import Program
from headrace.kernels.native.sampling import Prepared
from headrace.kernels.ops import Batch, DecodeState, Float32


class Captured:
    """`kernels.ops.Forward` of a program on a device. `cache` gives the KV cache's address; `owner` holds the weights,
    of which the program knows the addresses only."""

    def __init__(self, device: int, program: Program, cache: Callable[[], int | None], owner: object) -> None:
        self._device = device
        self._program = program
        self._cache = cache
        self._owner = owner

    def __call__(self, batch: Batch) -> Float32:
        return self._program(batch, self._cache())

    def decoder(self, state: DecodeState) -> Decoder:
        return Decoder(self._device, self._program, self._cache(), state)


class Decoder:
    """`kernels.ops.Decoder` by the library."""

    def __init__(self, device: int, program: Program, cache: int | None, state: DecodeState) -> None:
        batch, rows = state.batch, state.rows
        loaded = library.load()
        self._state, self._program = state, program  # whose arrays are used
        self._decodes = library.Decodes(
            len(batch.seq_lens),
            len(batch.slot_mapping),
            state.block_size,
            batch.block_tables.shape[2],
            address(state.chosen, np.int32),
            address(batch.token_ids, np.int32),
            address(batch.positions, np.int32),
            address(batch.seq_lens, np.int32),
            address(batch.slot_mapping, np.int32),
            address(batch.block_tables, np.int32),
            address(state.num_blocks, np.int32),
        )
        self._advance = loaded.hr_advance
        self._decode = loaded.hr_decode
        self._argument: Any = None
        if rows is None:
            return
        if state.streams is not None:
            self._decodes.streams, self._decodes.uniforms = address(state.streams), address(rows.uniforms)
        step, logits = program.prepared(batch, cache)
        self._prepared = Prepared(logits, rows, state.chosen)
        # ctypes makes a list of numbers where the call has just been, numpy elsewhere: that counts with cold caches.
        self._chosen = (ctypes.c_int32 * len(state.chosen)).from_address(state.chosen.ctypes.data)
        argument = library.DecodeStep(
            device, program.ops, len(program.ops), ctypes.pointer(step), ctypes.pointer(self._prepared.arguments),
            self._decodes,
        )  # fmt: skip
        self._argument = ctypes.byref(argument)

    def advance(self) -> None:
        if not self._advance(self._decodes):
            raise _no_block()

    def step(self) -> list[int]:
        broken = self._decode(self._argument)
        if broken:
            raise _no_block() if broken < 0 else self._prepared.error()
        return self._chosen[:]


def _no_block() -> ValueError:
    return ValueError("a sequence is to go on without a block for its token")
