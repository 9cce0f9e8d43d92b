"""The random numbers that choose tokens. They have no state: one is a hash of whose it is and where.

The uniform that chooses the token at `position` of sequence `index` of a request is a hash of (seed, index,
position), so it is the same alone or in a batch, before or after a preemption. With mix = the finaliser of splitmix64
and G = its increment, all modulo 2^64:

    stream = mix(mix(seed + G) + G * (index + 1))
    uniform = top 24 bits of mix(stream + G * (position + 1)), divided by 2^24
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from headrace.kernels.ops import Float32

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def random_stream(seed: int, index: int) -> int:
    """The 64-bit stream of one sequence; any integer is a seed."""
    return _mix((_mix((seed + _GOLDEN) & _WORD) + _GOLDEN * (index + 1)) & _WORD)


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def uniform(stream: int, position: int) -> float:
    """In [0, 1), exact in float32."""
    return (_mix((stream + _GOLDEN * (position + 1)) & _WORD) >> 40) * 2.0**-24


def uniforms(streams: Sequence[int], positions: Iterable[int]) -> Float32:
    """One for each (stream, position)."""
    return np.fromiter(map(uniform, streams, positions), np.float32, len(streams))
