"""From GGUF's block formats to the canonical weight.

GGUF stores a row as blocks of 32 values, scale and integers side by side; here they are taken apart. A block
of Q4_1 (20 bytes) and where its parts go:

    scale f16 | minimum f16 | 16 bytes, byte j = value j + 16 * value (j + 16)     w = q * scale + minimum
    -> scales   -> offsets     -> two neighbours a byte: value 2j + 16 * value (2j + 1)

Q4_0 has no minimum (w = (q - 8) * scale, so the offset is -8 * scale); Q8_0 is a scale and 32 signed bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.weight import Weight

BLOCK = 32
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def import_blocks(raw: NDArray[np.uint8], kind: str, shape: tuple[int, int]) -> Weight:
    """The weight [out, in] held by `raw` (uint8, all its bytes), of `kind` Q4_0, Q4_1 or Q8_0."""
    out, width = shape
    blocks = raw.reshape(out, width // BLOCK, BLOCK_BYTES[kind])
    scales = _float16(blocks, 0)
    if kind == "Q8_0":
        values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(out, width)
        return Weight(shape, values, bits=8, group_size=BLOCK, scales=scales)
    offsets = scales * np.float32(-8) if kind == "Q4_0" else _float16(blocks, 2)
    nibbles = blocks[..., BLOCK_BYTES[kind] - BLOCK // 2 :]
    values = np.empty((out, width // BLOCK, BLOCK // 2), np.uint8)
    # Values 0..15 of a block are the low nibbles, 16..31 the high ones.
    values[..., :8] = (nibbles[..., 0::2] & 15) | (nibbles[..., 1::2] << 4)
    values[..., 8:] = (nibbles[..., 0::2] >> 4) | (nibbles[..., 1::2] & 0xF0)
    return Weight(shape, values.reshape(out, width // 2), bits=4, group_size=BLOCK, scales=scales, offsets=offsets)


def _float16(blocks: NDArray[np.uint8], byte: int) -> NDArray[np.float32]:
    """The float16 at `byte` of every block, as float32 [out, blocks]."""
    return np.ascontiguousarray(blocks[..., byte : byte + 2]).view("<f2")[..., 0].astype(np.float32)


def rotary_rows(num_heads: int, head_dim: int) -> NDArray[np.int64]:
    """Which stored row is row r of a q or k matrix of the llama architecture.

    The file keeps rotary pairs side by side, the model takes them from the two halves of a head. One head of 6:

        stored  a0 b0 a1 b1 a2 b2      wanted  a0 a1 a2 b0 b1 b2      result  0 2 4 1 3 5
    """
    stored = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)
