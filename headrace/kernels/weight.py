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
