"""The one canonical form of a weight matrix, whatever file it came from.

Dense: `values` [out, in] as float32, float16, or bfloat16 bits in uint16.
Grouped: integers of `bits` bits in groups of `group_size` along the input, w = q * scale + offset, e.g. for
4 bits and 32 a group, out = 1, in = 32:

    values  [1, 16] uint8, two q a byte: column k in the low nibble of byte k / 2 if k is even, else the high
    scales  [1, 1]  float32          offsets [1, 1] float32, or None when every offset is zero (8 bits: q is int8)

Importers (GGUF, later AWQ, GPTQ, ...) produce it, kernels consume it, neither knows of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [out_features, in_features]; see the module's text for the two forms."""

    shape: tuple[int, int]
    values: NDArray[np.generic]
    bits: int = 0
    """0 for dense, else 4 or 8."""
    group_size: int = 0
    scales: NDArray[np.float32] | None = None
    offsets: NDArray[np.float32] | None = None

    @property
    def num_bytes(self) -> int:
        extra = (a.nbytes for a in (self.scales, self.offsets) if a is not None)
        return self.values.nbytes + sum(extra)

    def rows(self, index: slice | NDArray[np.integer]) -> Weight:
        """The same matrix with only the output rows of `index`, in its order (a view for a slice)."""
        values = self.values[index]
        return Weight(
            shape=(values.shape[0], self.shape[1]),
            values=values,
            bits=self.bits,
            group_size=self.group_size,
            scales=None if self.scales is None else self.scales[index],
            offsets=None if self.offsets is None else self.offsets[index],
        )

    def to_float32(self) -> NDArray[np.float32]:
        """[out, in] float32, a new array. Two roundings at most: of q * scale, then of + offset."""
        if self.bits == 0:
            return to_float32(self.values)
        out, width = self.shape
        dense = np.empty((out, width), np.float32)
        if self.bits == 4:
            pairs = self.values.astype(np.uint8, copy=False)
            dense[:, 0::2] = pairs & np.uint8(15)
            dense[:, 1::2] = pairs >> np.uint8(4)
        else:
            dense[:] = self.values
        grouped = dense.reshape(out, -1, self.group_size)
        assert self.scales is not None
        grouped *= self.scales[:, :, None]
        if self.offsets is not None:
            grouped += self.offsets[:, :, None]
        return dense


def to_float32(values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Float32, float16 or bfloat16 bits (uint16) as a new float32 array."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)
