"""Records a forward as a list of operations over numbered buffers, and replays the list with one call a step.

While a forward is recorded its buffers are `Symbol`s, which know a width and nothing else. Afterwards buffers that
are not needed any more lend their memory to later ones of their width:

    x = embed        buffer 0        n = norm(x)      buffer 1      qkv = linear(n)  buffer 2
    a = attention    buffer 1 again  y = linear(a)    buffer 3      ...
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.kernels.native import library
from headrace.kernels.native.library import address
from headrace.kernels.ops import Batch, Float32


@dataclass(frozen=True, slots=True)
class Symbol:
    """`width` columns, from `column` on, of the recording's buffer `buffer`."""

    buffer: int
    column: int
    width: int


@dataclass(frozen=True, slots=True)
class _Recorded:
    kind: str
    inputs: tuple[Symbol | None, ...]
    outputs: tuple[Symbol | None, ...]
    n: tuple[int, ...]
    f: tuple[float, ...]
    p: tuple[int | None, ...]
    sampling: bool


class Recording:
    """What the operations of a forward append to."""

    def __init__(self) -> None:
        self.operations: list[_Recorded] = []
        self.widths: list[int] = []
        self.sampling: list[bool] = []
        """Of each buffer: does it have a row for every row that samples, not for every row?"""
        self.inputs: list[int] = []

    def buffer(self, width: int, sampling: bool = False) -> Symbol:
        self.widths.append(width)
        self.sampling.append(sampling)
        return Symbol(len(self.widths) - 1, 0, width)

    def input(self, width: int) -> Symbol:
        """A buffer that the caller fills before each replay."""
        symbol = self.buffer(width)
        self.inputs.append(symbol.buffer)
        return symbol

    def append(
        self,
        kind: str,
        inputs: Sequence[Symbol | None],
        widths: Sequence[int],
        *,
        n: Sequence[int] = (),
        f: Sequence[float] = (),
        p: Sequence[int | None] = (),
    ) -> tuple[Symbol, ...]:
        """Its outputs, of these widths."""
        first = next((symbol for symbol in inputs if symbol is not None), None)
        sampling = kind == "pick" or (first is not None and self.sampling[first.buffer])
        outputs = tuple(self.buffer(width, sampling) for width in widths)
        self.operations.append(_Recorded(kind, tuple(inputs), outputs, tuple(n), tuple(f), tuple(p), sampling))
        return outputs


class Program:
    """A recording ready to run on a device, whose address is `device`. Not for two threads at once."""

    def __init__(self, device: int, recording: Recording, output: Symbol) -> None:
        self._library = library.load()
        self._device = device
        places, self._widths, self._sampling = _placed(recording, output)
        self.ops = (library.Op * len(recording.operations))()
        for op, recorded in zip(self.ops, recording.operations, strict=True):
            op.kind = library.OP_KINDS.index(recorded.kind)
            op.sampling = recorded.sampling
            for slots, symbols in ((op.inputs, recorded.inputs), (op.outputs, recorded.outputs)):
                for index in range(len(slots)):
                    symbol = symbols[index] if index < len(symbols) else None
                    slots[index].buffer = -1 if symbol is None else places[symbol.buffer]
                    slots[index].column = 0 if symbol is None else symbol.column
            op.n[: len(recorded.n)] = recorded.n
            op.f[: len(recorded.f)] = recorded.f
            op.p[: len(recorded.p)] = recorded.p
        self.uses_cache = any(recorded.kind == "attention" for recorded in recording.operations)
        self._inputs = [places[buffer] for buffer in recording.inputs]
        self._output = Symbol(places[output.buffer], output.column, output.width)
        self._capacity = [0, 0]
        self._arrays: list[Float32] = [np.empty((0, width), np.float32) for width in self._widths]
        self._buffers = (library.Buffer * len(self._widths))()
        self._batch: Batch | None = None
        self._cache: int | None = None
        self._step: Any = None
        self._rows: Float32 = self._arrays[self._output.buffer]

    def __call__(self, batch: Batch, cache: int | None, inputs: Sequence[Float32] = ()) -> Float32:
        """The output's rows, in memory that the next call writes to again. `cache`: the KV cache's address.

        A batch that is the same object as in the last call has the same arrays, whatever is in them by now."""
        if batch is not self._batch or cache != self._cache:
            step, self._rows = self.prepared(batch, cache)
            self._batch, self._cache, self._step = batch, cache, ctypes.byref(step)
        for place, values in zip(self._inputs, inputs, strict=True):
            self._arrays[place][: len(values)] = values
        self._library.hr_run(self._device, self.ops, len(self.ops), self._step)
        return self._rows

    def prepared(self, batch: Batch, cache: int | None) -> tuple[library.Step, Float32]:
        """The addresses of a batch's arrays, which whoever uses them keeps, and the part of the output that is its.
        Of use until there is another batch."""
        rows, sample_rows = len(batch.token_ids), len(batch.sample_rows)
        self._make_room(rows, sample_rows)
        token_ids, positions, query_start, seq_lens = (
            address(part, np.int32) for part in (batch.token_ids, batch.positions, batch.query_start, batch.seq_lens)
        )
        groups = (library.BatchView * len(batch.slot_mapping))(
            *(
                library.BatchView(
                    rows, len(batch.seq_lens), token_ids, positions, address(slots, np.int32), query_start, seq_lens,
                    address(tables, np.int32), tables.shape[1],
                )
                for slots, tables in zip(batch.slot_mapping, batch.block_tables, strict=True)
            )
        )  # fmt: skip
        step = library.Step(cache, groups, address(batch.sample_rows, np.int32), sample_rows, self._buffers)
        count = sample_rows if self._sampling[self._output.buffer] else rows
        output = self._output
        return step, self._arrays[output.buffer][:count, output.column : output.column + output.width]

    def _make_room(self, rows: int, sample_rows: int) -> None:
        for sampling, wanted in enumerate((rows, sample_rows)):
            if wanted <= self._capacity[sampling]:
                continue
            # In steps, so that a growing batch does not allocate each time; pages are taken when they are written.
            self._capacity[sampling] = max(wanted, 2 * self._capacity[sampling], 16)
            for index, width in enumerate(self._widths):
                if self._sampling[index] == bool(sampling):
                    self._arrays[index] = np.empty((self._capacity[sampling], width), np.float32)
                    self._buffers[index].data = self._arrays[index].ctypes.data
                    self._buffers[index].width = width


def record(
    device: int, forward: Callable[[Recording, Sequence[Symbol]], Symbol], input_widths: Sequence[int] = ()
) -> Program:
    recording = Recording()
    inputs = [recording.input(width) for width in input_widths]
    return Program(device, recording, forward(recording, inputs))


def _placed(recording: Recording, output: Symbol) -> tuple[list[int], list[int], list[bool]]:
    """Each buffer's place in memory; the places' widths, and whether they are of rows that sample."""
    last_use = [-1] * len(recording.widths)
    for index, operation in enumerate(recording.operations):
        for symbol in (*operation.inputs, *operation.outputs):
            if symbol is not None:
                last_use[symbol.buffer] = index
    last_use[output.buffer] = len(recording.operations)
    places = [-1] * len(recording.widths)
    widths: list[int] = []
    sampling: list[bool] = []
    free: dict[tuple[int, bool], list[int]] = {}

    def place(buffer: int) -> None:
        form = (recording.widths[buffer], recording.sampling[buffer])
        waiting = free.get(form)
        if waiting:
            places[buffer] = waiting.pop()
            return
        places[buffer] = len(widths)
        widths.append(form[0])
        sampling.append(form[1])

    for buffer in recording.inputs:
        place(buffer)
    for index, operation in enumerate(recording.operations):
        for symbol in operation.outputs:
            if symbol is not None and places[symbol.buffer] < 0:
                place(symbol.buffer)
        ended = {
            s.buffer for s in (*operation.inputs, *operation.outputs) if s is not None and last_use[s.buffer] == index
        }
        for buffer in ended - set(recording.inputs):
            free.setdefault((recording.widths[buffer], recording.sampling[buffer]), []).append(places[buffer])
    return places, widths, sampling
