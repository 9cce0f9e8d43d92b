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
        self._argument: Any = None
        self._prepared: Prepared | None = None

    def __call__(self, logits: Float32, rows: SamplingRows) -> SampledRows:
        """One token for each row of `logits` [rows, vocab], in memory that the next call may write to again. Raises
        InvalidLogits.

        What is the same object as in the last call has the same arrays, whatever is in them by now."""
        if rows is not self._rows or logits is not self._logits or self._prepared is None:
            self._prepared = Prepared(logits, rows)
            self._logits, self._rows, self._argument = logits, rows, ctypes.byref(self._prepared.arguments)
        if self._library.hr_sample(self._device, self._argument):
            raise self._prepared.error()
        return self._prepared.sampled


class Prepared:
    """The `arguments` that have the library choose a token for each row of `logits`, and what comes of it. The arrays
    they are made of are whose they were."""

    def __init__(self, logits: Float32, rows: SamplingRows, token_ids: NDArray[np.int32] | None = None) -> None:
        """`token_ids`, if given, are where the tokens go."""
        count, self._vocab = logits.shape
        self._broken = np.empty(count, np.uint8)
        token_ids = np.empty(count, np.int32) if token_ids is None else token_ids
        self.arguments = library.SampleArgs(
            logits=library.View(logits.ctypes.data, logits.strides[0] // 4),
            rows=count,
            vocab=self._vocab,
            temperature=address(rows.temperature, np.float32),
            uniforms=address(rows.uniforms, np.float32),
            top_k=address(rows.top_k, np.int32),
            top_p=address(rows.top_p, np.float32),
            min_p=address(rows.min_p, np.float32),
            repetition_penalty=address(rows.repetition_penalty, np.float32),
            frequency_penalty=address(rows.frequency_penalty, np.float32),
            presence_penalty=address(rows.presence_penalty, np.float32),
            seen=_lists(rows.seen),
            generated=_lists(rows.generated),
            logit_bias=_lists(rows.logit_bias),
            forbidden=_lists(rows.forbidden),
            allowed=_lists(rows.allowed),
            scored=_lists(rows.scored),
            given=address(rows.given, np.int32),
            mask=address(rows.mask, np.uint32),
            masked=address(rows.masked, np.uint8),
            num_logprobs=-1,
            token_ids=address(token_ids, np.int32),
            broken=address(self._broken),
        )
        reports: dict[str, NDArray[Any]] = {}
        if rows.num_logprobs is not None:
            width = min(rows.num_logprobs, self._vocab)
            self.arguments.num_logprobs = width
            shapes: dict[str, tuple[Any, Any]] = {
                "logprobs": (count, np.float32),
                "ranks": (count, np.int32),
                "top_token_ids": ((count, width), np.int32),
                "top_logprobs": ((count, width), np.float32),
            }
            if rows.scored is not None:
                shapes["scored_logprobs"] = len(rows.scored.token_ids), np.float32
            for name, (shape, dtype) in shapes.items():
                reports[name] = np.empty(shape, dtype)
                setattr(self.arguments, name, address(reports[name]))
        self.sampled = SampledRows(token_ids, **reports)

    def error(self) -> MemoryError | InvalidLogits:
        """What was wrong when the library said that rows are broken."""
        if (self._broken == 2).any():
            return MemoryError(f"no memory to choose tokens of {self._vocab} in")
        return InvalidLogits(np.flatnonzero(self._broken).tolist())


def _lists(part: TokenLists | None) -> library.TokenLists:
    if part is None:
        return library.TokenLists()
    return library.TokenLists(
        address(part.starts, np.int32), address(part.token_ids, np.int32), address(part.numbers, np.float32)
    )
