"""Every operation of `kernels.ops` as a line of a recording, and the handles they take.

Buffers are float32 whatever the compute dtype, which says how dense weights and the KV cache are held. Weights in
groups of few bits stay as they are in memory; their products take activations rounded to whole numbers a group, or,
where the compute dtype is float32, exact ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.config import kv_cache_format
from headrace.kernels.int8_weights import GROUP_SIZE, quantises
from headrace.kernels.native import library
from headrace.kernels.native.decode import Captured
from headrace.kernels.native.library import address, contiguous
from headrace.kernels.native.program import Program, Recording, Symbol, record
from headrace.kernels.native.sampling import Sampler
from headrace.kernels.ops import Batch, BatchHandle, Float32, KVCacheLayout, SampledRows, SamplingRows
from headrace.kernels.weight import Weight, to_float32

ROWS_AT_ONCE = 4096
"""Of a matrix, turned back to float32."""

THE_BATCH = object()
"""The handle of the batch while a forward is recorded: there is one, the step's."""


class Matrix:
    """A packed matrix [out, in] of the library, freed with this object; `grouped` if its checkpoint held few bits."""

    def __init__(self, pointer: int, shape: tuple[int, int], grouped: bool) -> None:
        self.pointer = pointer
        self.shape = shape
        self.grouped = grouped
        self.num_bytes: int = library.load().hr_matrix_bytes(pointer)

    def __del__(self) -> None:
        library.load().hr_matrix_free(self.pointer)


@dataclass(frozen=True, slots=True)
class Experts:
    matrices: tuple[Matrix, ...]
    pointers: Any
    """Their addresses as an array."""


@dataclass(frozen=True, slots=True)
class RopeTable:
    cos: Float32
    sin: Float32


class _Device:
    def __init__(self, variant: str, threads: int) -> None:
        available = library.variants()
        if variant not in available:
            raise ValueError(f"this CPU has no variant {variant} of the kernels; it has {', '.join(available)}")
        self.pointer: int = library.load().hr_device_new(available.index(variant), threads)
        if not self.pointer:
            raise MemoryError(f"the {threads} threads of the kernels cannot be started")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            library.load().hr_device_free(self.pointer)


class _Cache:
    def __init__(self, layout: KVCacheLayout, dtype: str) -> None:
        self.pointer: int = library.load().hr_cache_new(
            layout.num_layers, layout.num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim,
            library.KV_DTYPES[dtype],
        )  # fmt: skip
        if not self.pointer:
            raise MemoryError(f"the memory of {layout.num_blocks} blocks of the KV cache cannot be mapped")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            library.load().hr_cache_free(self.pointer)


class NativeKernels:
    """`dtype` float32, bfloat16 or float16; `variant` of `library.variants()`, the best by default.

    With `int8_weights` dense weights but for embeddings become int8 as they are prepared (kernels/int8_weights.py).

    Raises LibraryMissing where csrc/ was not built.
    """

    name = "native"
    device = "cpu"

    def __init__(
        self,
        dtype: str = "float32",
        threads: int = 1,
        *,
        kv_cache_dtype: str = "auto",
        int8_weights: bool = False,
        variant: str | None = None,
    ) -> None:
        self.dtype = dtype
        self.threads = threads
        self.kv_cache_dtype = kv_cache_format.kv_cache_dtype(kv_cache_dtype, dtype)
        self.variant = variant or library.variants()[0]
        self.int8_weights = int8_weights
        self.weight_bytes = 0
        self._library = library.load()
        self._device = _Device(self.variant, threads)
        self.sample: Callable[[Float32, SamplingRows], SampledRows] = Sampler(self._device.pointer)
        """`logits` [rows, vocab]: what a captured forward gave."""
        self._cache: _Cache | None = None
        self._recording: Recording | None = None

    # set-up

    def prepare_weight(self, weight: Weight, exact: bool = False) -> Matrix:
        if self.int8_weights and not exact and quantises(weight):
            return self._pack(self._to_int8(weight.shape, [weight.values]), "int8")
        return self._pack(weight, "int8" if weight.bits and self.dtype != "float32" else "float")

    def prepare_embedding(self, weight: Weight) -> Matrix:
        return self.prepare_weight(weight, exact=True)

    def prepare_tied(self, table: Matrix) -> Matrix:
        if not self.int8_weights or table.grouped or table.shape[1] % GROUP_SIZE:
            return table
        return self._pack(self._to_int8(table.shape, self._float_rows(table)), "int8")

    def _float_rows(self, matrix: Matrix) -> Iterator[Float32]:
        """A packed matrix, some rows at a time."""
        rows, width = matrix.shape
        for start in range(0, rows, ROWS_AT_ONCE):
            index = np.arange(start, min(start + ROWS_AT_ONCE, rows), dtype=np.int32)
            part = np.empty((len(index), width), np.float32)
            self._library.hr_matrix_rows(
                self._device.pointer, matrix.pointer, index.ctypes.data, len(index), part.ctypes.data, width
            )
            yield part

    def _to_int8(self, shape: tuple[int, int], parts: Iterable[NDArray[Any]]) -> Weight:
        """What `to_int8` makes of the rows of all parts."""
        rows, width = shape
        values, scales = np.empty(shape, np.int8), np.empty((rows, width // GROUP_SIZE), np.float32)
        start = 0
        for part in parts:
            held, end = np.ascontiguousarray(part), start + len(part)
            source = library.SourceWeight(
                held.ctypes.data, None, None, *held.shape, library.STORAGE[_storage(held)], GROUP_SIZE
            )
            self._library.hr_quantise(
                self._device.pointer, ctypes.byref(source), values[start:end].ctypes.data, scales[start:end].ctypes.data
            )
            start = end
        return Weight(shape, values, bits=8, group_size=GROUP_SIZE, scales=scales)

    def prepare_experts(self, weights: Iterable[Weight]) -> Experts:
        matrices = tuple(self.prepare_weight(weight) for weight in weights)
        return Experts(matrices, (ctypes.c_void_p * len(matrices))(*(matrix.pointer for matrix in matrices)))

    def prepare_vector(self, values: NDArray[np.generic], exact: bool = False) -> Float32:
        vector = values.astype(np.float32)
        if not exact:
            vector = to_float32(_rounded(vector, self.dtype))
        self.weight_bytes += vector.nbytes
        return contiguous(vector, np.float32)

    def prepare_rope(self, cos: Float32, sin: Float32) -> RopeTable:
        return RopeTable(contiguous(cos, np.float32), contiguous(sin, np.float32))

    def _pack(self, weight: Weight, scheme: str) -> Matrix:
        values = weight.values
        if weight.bits:
            storage = f"int{weight.bits}"
        else:
            # float32 arithmetic is exact on whatever the checkpoint holds.
            if self.dtype != "float32":
                values = _rounded(values, self.dtype)
            storage = _storage(values)
            if storage == "bfloat16" and self.dtype == "bfloat16":
                scheme = "bfloat16"
        held = [
            np.ascontiguousarray(values),
            *(None if part is None else contiguous(part, np.float32) for part in (weight.scales, weight.offsets)),
        ]
        source = library.SourceWeight(
            *(address(part) for part in held), *weight.shape, library.STORAGE[storage], weight.group_size
        )
        pointer = self._library.hr_matrix_new(self._device.pointer, ctypes.byref(source), library.SCHEMES[scheme])
        if not pointer:
            raise MemoryError(f"a matrix of {weight.shape[0]} x {weight.shape[1]} weights cannot be packed")
        matrix = Matrix(pointer, weight.shape, weight.bits > 0)
        self.weight_bytes += matrix.num_bytes
        return matrix

    # the KV cache

    def allocate_kv_cache(self, layout: KVCacheLayout) -> None:
        """Map the cache; memory is taken as it is written."""
        self.release_kv_cache()
        self._cache = _Cache(layout, self.kv_cache_dtype)

    def release_kv_cache(self) -> None:
        self._cache = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        flat = np.array(pairs, np.int32)
        if self._library.hr_cache_copy_blocks(self._kv_cache().pointer, flat.ctypes.data, len(pairs)):
            raise MemoryError(f"no memory to copy {len(pairs)} blocks of the KV cache")

    def read_blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """[blocks, bytes of a block in all layers]"""
        cache = self._kv_cache()
        size = self._library.hr_cache_block_bytes(cache.pointer)
        out = np.empty((len(block_ids), size), np.uint8)
        for block_id, row in zip(block_ids, out, strict=True):
            self._library.hr_cache_read_block(cache.pointer, block_id, row.ctypes.data)
        return out

    def write_blocks(self, block_ids: Sequence[int], data: NDArray[np.uint8]) -> None:
        """What `read_blocks` gave."""
        cache = self._kv_cache()
        for block_id, row in zip(block_ids, data, strict=True):
            self._library.hr_cache_write_block(cache.pointer, block_id, row.ctypes.data)

    def _kv_cache(self) -> _Cache:
        if self._cache is None:
            raise RuntimeError("no KV cache is allocated: call allocate_kv_cache before the first step")
        return self._cache

    # a step

    def capture(self, forward: Callable[[BatchHandle], Symbol]) -> Captured:
        """`forward` runs once, now, without a batch."""
        program = self._record(lambda inputs: forward(THE_BATCH), ())
        cache = (lambda: self._kv_cache().pointer) if program.uses_cache else lambda: None
        return Captured(self._device.pointer, program, cache, owner=forward)

    def evaluate(
        self, forward: Callable[..., Symbol], inputs: Sequence[Float32] = (), batch: Batch | None = None
    ) -> Float32:
        """`forward(batch, *inputs)` once, over arrays [rows, width]: for tests and for looking at one operation."""
        rows = len(inputs[0]) if inputs else 0
        program = self._record(lambda symbols: forward(THE_BATCH, *symbols), [array.shape[1] for array in inputs])
        cache = None if self._cache is None else self._cache.pointer
        return program(batch or _rows_alone(rows), cache, inputs).copy()

    def _record(self, forward: Callable[[Sequence[Symbol]], Symbol], input_widths: Sequence[int]) -> Program:
        def recorded(recording: Recording, inputs: Sequence[Symbol]) -> Symbol:
            self._recording = recording
            try:
                return forward(inputs)
            finally:
                self._recording = None

        return record(self._device.pointer, recorded, input_widths)

    def _append(self, kind: str, inputs: Sequence[Symbol | None], widths: Sequence[int], **rest: Any) -> Symbol:
        return self._append_all(kind, inputs, widths, **rest)[0]

    def _append_all(
        self, kind: str, inputs: Sequence[Symbol | None], widths: Sequence[int], **rest: Any
    ) -> tuple[Symbol, ...]:
        if self._recording is None:
            raise RuntimeError("operations are recorded: call them from a forward given to `capture`")
        return self._recording.append(kind, inputs, widths, **rest)

    def embedding(self, table: Matrix, batch: BatchHandle) -> Symbol:
        return self._append("embed", (), [table.shape[1]], p=[table.pointer])

    def position_embedding(self, table: Matrix, batch: BatchHandle) -> Symbol:
        return self._append("embed", (), [table.shape[1]], n=[1], p=[table.pointer])

    def linear(self, x: Symbol, weight: Matrix, bias: Float32 | None) -> Symbol:
        return self._append("linear", [x], [weight.shape[0]], p=[weight.pointer, address(bias)])

    def rms_norm(self, x: Symbol, weight: Float32, eps: float) -> Symbol:
        n = [x.width // len(weight), len(weight)]
        return self._append("norm", [x], [x.width], n=n, f=[eps], p=[address(weight)])

    def add_rms_norm(self, x: Symbol, residual: Symbol, weight: Float32, eps: float) -> tuple[Symbol, Symbol]:
        n = [x.width // len(weight), len(weight)]
        y, total = self._append_all("norm", [x, residual], [x.width] * 2, n=n, f=[eps], p=[address(weight)])
        return y, total

    def layer_norm(self, x: Symbol, weight: Float32, bias: Float32, eps: float) -> Symbol:
        return self._append("layer_norm", [x], [x.width], n=[x.width], f=[eps], p=[address(weight), address(bias)])

    def split(self, x: Symbol, widths: tuple[int, ...]) -> tuple[Symbol, ...]:
        starts = np.cumsum([0, *widths])[:-1].tolist()
        return tuple(Symbol(x.buffer, x.column + start, width) for start, width in zip(starts, widths, strict=True))

    def rope(self, x: Symbol, table: RopeTable, head_dim: int, batch: BatchHandle) -> Symbol:
        n = [table.cos.shape[1], head_dim, x.width // head_dim]
        return self._append("rope", [x], [x.width], n=n, p=[address(table.cos), address(table.sin)])

    def attention(
        self,
        q: Symbol,
        k: Symbol,
        v: Symbol,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        batch: BatchHandle,
        window: int | None = None,
        group: int = 0,
    ) -> Symbol:
        n = [layer, group, num_heads, num_kv_heads, q.width // num_heads, window or 0]
        return self._append("attention", [q, k, v], [q.width], n=n, f=[scale])

    def encoder_attention(
        self, q: Symbol, k: Symbol, v: Symbol, *, num_heads: int, scale: float, batch: BatchHandle
    ) -> Symbol:
        n = [num_heads, q.width // num_heads]
        return self._append("encoder_attention", [q, k, v], [q.width], n=n, f=[scale])

    def gelu(self, x: Symbol) -> Symbol:
        return self._append("gelu", [x], [x.width], n=[x.width])

    def tanh(self, x: Symbol) -> Symbol:
        return self._append("tanh", [x], [x.width], n=[x.width])

    def silu_mul(self, x: Symbol) -> Symbol:
        return self._append("silu_mul", [x], [x.width // 2], n=[x.width // 2])

    def gelu_mul(self, x: Symbol) -> Symbol:
        return self._append("gelu_mul", [x], [x.width // 2], n=[x.width // 2])

    def experts(
        self, x: Symbol, router: Symbol, gate_up: Experts, down: Experts, *, top_k: int, normalize: bool
    ) -> Symbol:
        return self._append(
            "experts",
            [x, router],
            [x.width],
            n=[x.width, router.width, top_k, int(normalize)],
            p=[ctypes.addressof(gate_up.pointers), ctypes.addressof(down.pointers)],
        )

    def scale(self, x: Symbol, factor: float) -> Symbol:
        rounded = float(to_float32(_rounded(np.array([factor], np.float32), self.dtype))[0])
        return self._append("scale", [x], [x.width], n=[x.width], f=[rounded])

    def add(self, a: Symbol, b: Symbol) -> Symbol:
        return self._append("add", [a, b], [a.width], n=[a.width])

    def sample_rows(self, x: Symbol, batch: BatchHandle) -> Symbol:
        return self._append("pick", [x], [x.width], n=[x.width])

    def host_rows(self, rows: Float32) -> Float32:
        """A copy: the next step writes to the same memory."""
        return rows.copy()


def _storage(values: NDArray[Any]) -> str:
    """What dense values are held as; bfloat16 as its bits."""
    return {"f4": "float32", "f2": "float16", "u2": "bfloat16"}[values.dtype.str[1:]]


def _rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Dense values as `dtype`: float32, float16, or the bits of bfloat16 in uint16."""
    if _storage(values) == dtype:
        return values
    wide = to_float32(values)
    if dtype == "float32":
        return wide
    if dtype == "float16":
        return wide.astype(np.float16)
    bits = wide.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def _rows_alone(rows: int) -> Batch:
    """Rows that are sequences of one token each; all of them sample."""
    zeros = np.zeros(rows, np.int32)
    return Batch(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=zeros[None],
        query_start=np.arange(rows + 1, dtype=np.int32),
        seq_lens=np.ones(rows, np.int32),
        block_tables=np.zeros((1, rows, 1), np.int32),
        sample_rows=np.arange(rows, dtype=np.int32),
    )
