"""Dense weights as int8 in groups, made while a checkpoint is loaded: what `--quantization int8` means.

A scale for each group of 32 inputs of a row, 127 of it for the largest magnitude, held as the nearest float16; the
result is a grouped Weight like those that a GGUF file of Q8_0 holds. One scale for a whole row, of the weight and of
what it is multiplied with, costs five times as much in quality: language models have a few large activations.

    group of w  [0.50 -1.00 ...]  ->  scale 1 / 127, q [64 -127 ...]
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.weight import Weight

GROUP_SIZE = 32
LARGEST = 127
VALUES_AT_ONCE = 1 << 18
"""Of a weight, as float32, while it is quantised: few enough for a CPU's cache."""


def quantises(weight: Weight) -> bool:
    """Whether `to_int8` takes the weight: a dense one as wide as whole groups."""
    return weight.bits == 0 and weight.shape[1] % GROUP_SIZE == 0


def to_int8(weight: Weight) -> Weight:
    rows, width = weight.shape
    values = np.empty((rows, width), np.int8)
    scales = np.empty((rows, width // GROUP_SIZE), np.float32)
    step = max(1, VALUES_AT_ONCE // width)
    for start in range(0, rows, step):
        at = slice(start, start + step)
        groups = weight.rows(at).to_float32().reshape(-1, width // GROUP_SIZE, GROUP_SIZE)
        scale = (np.maximum(groups.max(-1), -groups.min(-1)) / np.float32(LARGEST)).astype(np.float16)
        scales[at] = scale
        inverse = np.divide(1.0, scales[at], out=np.zeros_like(scales[at]), where=scales[at] > 0)
        groups *= inverse[:, :, None]
        np.clip(np.rint(groups, out=groups), -LARGEST, LARGEST, out=groups)
        values[at] = groups.reshape(-1, width)
    return Weight((rows, width), values, bits=8, group_size=GROUP_SIZE, scales=scales)
