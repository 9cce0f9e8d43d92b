"""`sample` of kernels.ops by the library: the parts of SamplingRows as addresses, the outcome as arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.native import library
from headrace.kernels.native.library import address
from headrace.kernels.ops import Float32, InvalidLogits, SampledRows, SamplingRows, TokenLists


class Sampler:
    """`sample` on a device, whose address this is. Not for two threads at once."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._library = library.load()
        self._logits: Float32 | None = None
        self._rows: SamplingRows | None = None
        self._arguments: Any = None
        self._broken: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._sampled = SampledRows(np.empty(0, np.int32))

    def __call__(self, logits: Float32, rows: SamplingRows) -> SampledRows:
        """One token for each row of `logits` [rows, vocab], in memory that the next call may write to again. Raises
        InvalidLogits.

        What is the same object as in the last call has the same arrays, whatever is in them by now."""
        if rows is not self._rows or logits is not self._logits:
            self._prepare(logits, rows)
        if self._library.hr_sample(self._device, self._arguments):
            if (self._broken == 2).any():
                raise MemoryError(f"no memory to choose tokens of {logits.shape[1]} in")
            raise InvalidLogits(np.flatnonzero(self._broken).tolist())
        return self._sampled

    def _prepare(self, logits: Float32, rows: SamplingRows) -> None:
        count, vocab = logits.shape

        def given(array: NDArray[Any] | None, dtype: Any) -> int | None:
            assert array is None or array.dtype == dtype
            return address(array)

        def lists(part: TokenLists | None) -> library.TokenLists:
            if part is None:
                return library.TokenLists()
            return library.TokenLists(
                given(part.starts, np.int32), given(part.token_ids, np.int32), given(part.numbers, np.float32)
            )

        def wanted(shape: int | tuple[int, int], dtype: Any) -> tuple[NDArray[Any], int]:
            array = np.empty(shape, dtype)
            return array, array.ctypes.data

        token_ids, token_ids_at = wanted(count, np.int32)
        self._broken, broken_at = wanted(count, np.uint8)
        arguments = library.SampleArgs(
            logits=library.View(logits.ctypes.data, logits.strides[0] // 4),
            rows=count,
            vocab=vocab,
            temperature=given(rows.temperature, np.float32),
            uniforms=given(rows.uniforms, np.float32),
            top_k=given(rows.top_k, np.int32),
            top_p=given(rows.top_p, np.float32),
            min_p=given(rows.min_p, np.float32),
            repetition_penalty=given(rows.repetition_penalty, np.float32),
            frequency_penalty=given(rows.frequency_penalty, np.float32),
            presence_penalty=given(rows.presence_penalty, np.float32),
            seen=lists(rows.seen),
            generated=lists(rows.generated),
            logit_bias=lists(rows.logit_bias),
            forbidden=lists(rows.forbidden),
            allowed=lists(rows.allowed),
            scored=lists(rows.scored),
            given=given(rows.given, np.int32),
            mask=given(rows.mask, np.uint32),
            masked=given(rows.masked, np.uint8),
            num_logprobs=-1,
            token_ids=token_ids_at,
            broken=broken_at,
        )
        reports: dict[str, NDArray[Any]] = {}
        if rows.num_logprobs is not None:
            width = min(rows.num_logprobs, vocab)
            arguments.num_logprobs = width
            for name, shape, dtype in (
                ("logprobs", count, np.float32),
                ("ranks", count, np.int32),
                ("top_token_ids", (count, width), np.int32),
                ("top_logprobs", (count, width), np.float32),
            ):
                reports[name], at = wanted(shape, dtype)
                setattr(arguments, name, at)
            if rows.scored is not None:
                reports["scored_logprobs"], arguments.scored_logprobs = wanted(len(rows.scored.token_ids), np.float32)
        self._logits, self._rows = logits, rows
        self._arguments = ctypes.byref(arguments)
        self._sampled = SampledRows(token_ids, **reports)
