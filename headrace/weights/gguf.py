"""From GGUF's block formats to the canonical weight.

GGUF stores a row as blocks of 32 or 256 values, scales and integers side by side; here they are taken apart. A
block of Q4_1 (20 bytes) and where its parts go:

    scale f16 | minimum f16 | 16 bytes, byte j = value j + 16 * value (j + 16)     w = q * scale + minimum
    -> scales   -> offsets     -> two neighbours a byte: value 2j + 16 * value (2j + 1)

    Q4_0  no minimum: w = (q - 8) * scale, so the offset is -8 * scale         Q8_0  a scale and 32 signed bytes
    Q5_0  scale | 32 fifth bits | nibbles as above, w = (q - 16) * scale       Q5_1  the same after Q4_1
    Q4_K  256 values in 8 groups: scale, scale of minima, 8 scales and 8 minima of 6 bits, nibbles
    Q5_K  the same with a fifth bit of each value before the nibbles
    Q6_K  nibbles | 256 times 2 high bits | 16 signed scales of groups of 16 | scale, w = (q - 32) * scale

Values of 5 and 6 bits are held as 8. Each number is the product of the same two float32 as in GGUF's own
library, so the weights equal what that one gives, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.weight import Weight

Blocks = NDArray[np.uint8]
"""[out, blocks of a row, bytes of a block]"""
Integers = NDArray[Any]
Parts = tuple[Integers, NDArray[np.float32], NDArray[np.float32] | None]
"""Integers [out, groups of a row, group size] (4 bits: two a byte), scales and offsets [out, groups of a row]."""

SUPER_BLOCK = 256
BLOCK_BYTES = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
}


def import_blocks(raw: NDArray[np.uint8], kind: str, shape: tuple[int, int]) -> Weight:
    """The weight [out, in] held by `raw` (uint8, all its bytes), of a `kind` of BLOCK_BYTES."""
    out, width = shape
    values, scales, offsets = _READERS[kind](raw.reshape(out, -1, BLOCK_BYTES[kind]))
    if kind in ("Q4_0", "Q4_1", "Q4_K"):
        packed = values.reshape(out, width // 2)
        return Weight(shape, packed, bits=4, group_size=32, scales=scales, offsets=offsets)
    group_size = values.shape[-1]
    values = values.astype(np.int8, copy=False).reshape(out, width)
    return Weight(shape, values, bits=8, group_size=group_size, scales=scales, offsets=offsets)


def _q4_0(blocks: Blocks) -> Parts:
    scales = _float16(blocks, 0)
    return _joined_pairs(_bytes(blocks, 2)), scales, scales * np.float32(-8)


def _q4_1(blocks: Blocks) -> Parts:
    return _joined_pairs(_bytes(blocks, 4)), _float16(blocks, 0), _float16(blocks, 2)


def _q5_0(blocks: Blocks) -> Parts:
    values = _halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return values.astype(np.int8) - np.int8(16), _float16(blocks, 0), None


def _q5_1(blocks: Blocks) -> Parts:
    return _halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]), _float16(blocks, 0), _float16(blocks, 2)


def _q8_0(blocks: Blocks) -> Parts:
    return _bytes(blocks, 2).view(np.int8), _float16(blocks, 0), None


def _q4_k(blocks: Blocks) -> Parts:
    out, count, _ = blocks.shape
    # Of every 32 bytes the low nibbles are one group, the high ones the next.
    low, high = _pairs(_bytes(blocks, 16))
    groups = np.stack([low.reshape(out, count, 4, 16), high.reshape(out, count, 4, 16)], axis=-2)
    return groups, *_six_bit_scales(blocks)


def _q5_k(blocks: Blocks) -> Parts:
    low = _pairs_of_groups(blocks[..., 48:])
    # Bit g of byte k is the fifth bit of value k of group g.
    high = blocks[..., 16:48][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]
    high = (high & np.uint8(1)) << np.uint8(4)
    return low | high.reshape(low.shape), *_six_bit_scales(blocks)


def _q6_k(blocks: Blocks) -> Parts:
    out, count, _ = blocks.shape
    # Each half of a block: 64 bytes of which the low nibbles are 64 values, the high ones the next 64; 32 bytes of
    # high bits, of which bits 0 and 1 belong to the first 32 values, 2 and 3 to the next, and so on.
    low = blocks[..., :128].reshape(out, count, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None]
    high = blocks[..., 128:192].reshape(out, count, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    values = (low & np.uint8(15)).reshape(out, count, 2, 128)
    values |= ((high & np.uint8(3)) << np.uint8(4)).reshape(values.shape)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    scales *= _float16(blocks, 208)[..., None]
    return values.reshape(out, -1, 16).astype(np.int8) - np.int8(32), scales.reshape(out, -1), None


_READERS: dict[str, Callable[[Blocks], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _joined_pairs(nibbles: Blocks) -> Integers:
    """[out, blocks, 16]: of the 16 bytes of a block the low nibbles, then the high ones."""
    low, high = _pairs(nibbles)
    joined = np.empty(nibbles.shape, np.uint8)
    # Eight bytes as one number, for numpy takes its time over short rows.
    halves = joined.view(np.uint64)
    halves[..., 0] = low.view(np.uint64)[..., 0]
    halves[..., 1] = high.view(np.uint64)[..., 0]
    return joined


def _pairs(nibbles: Blocks) -> tuple[Integers, Integers]:
    """Of n bytes the low nibbles, and the high ones, each as n / 2 bytes of two neighbours."""
    # Two bytes at a time as one number: four passes over half as many, instead of taking every value apart.
    words = nibbles.view("<u2")
    low = (words & np.uint16(0x0F)) | ((words >> np.uint16(4)) & np.uint16(0xF0))
    high = ((words >> np.uint16(4)) & np.uint16(0x0F)) | ((words >> np.uint16(8)) & np.uint16(0xF0))
    return low.astype(np.uint8), high.astype(np.uint8)


def _halves(nibbles: Blocks) -> Integers:
    """[out, blocks, 32]: values 0..15 of a block are the low nibbles, 16..31 the high ones."""
    return np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=-1)


def _fifth_bits(bits: Blocks) -> Integers:
    """[out, blocks, 32]: bit j of the four bytes, as the bit worth 16 of value j."""
    return np.unpackbits(bits, axis=-1, bitorder="little") << np.uint8(4)


def _pairs_of_groups(nibbles: Blocks) -> Integers:
    """[out, groups, 32]: of every 32 bytes the low nibbles are one group, the high ones the next."""
    out, count, _ = nibbles.shape
    pairs = nibbles.reshape(out, count, 4, 1, 32) >> np.array([0, 4], np.uint8)[:, None]
    return (pairs & np.uint8(15)).reshape(out, count * 8, 32)


def _six_bit_scales(blocks: Blocks) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and offsets [out, groups] of Q4_K and Q5_K. Of 12 bytes, 0..3 hold scales 0..3 in their low six bits and
    4..7 minima 0..3; 8..11 hold the low four bits of scales 4..7 and, above, of minima 4..7, whose two high bits
    are the high bits of bytes 0..7."""
    out, count, _ = blocks.shape
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    high = np.uint8(0x30)
    scales = np.concatenate([first & 63, (third & 15) | ((first >> np.uint8(2)) & high)], axis=-1)
    minima = np.concatenate([second & 63, (third >> np.uint8(4)) | ((second >> np.uint8(2)) & high)], axis=-1)
    scales32 = scales.astype(np.float32) * _float16(blocks, 0)[..., None]
    offsets32 = minima.astype(np.float32) * -_float16(blocks, 2)[..., None]
    return scales32.reshape(out, count * 8), offsets32.reshape(out, count * 8)


def _float16(blocks: Blocks, byte: int) -> NDArray[np.float32]:
    """The float16 at `byte` of every block, as float32 [out, blocks]."""
    return _field(blocks, byte, "<f2").astype(np.float32)


def _bytes(blocks: Blocks, first: int) -> Blocks:
    """The bytes of every block from `first` on, [out, blocks, bytes], side by side in memory."""
    out, count, size = blocks.shape
    return _field(blocks, first, f"V{size - first}").copy().view(np.uint8).reshape(out, count, size - first)


def _field(blocks: Blocks, byte: int, kind: str) -> NDArray[Any]:
    """What lies at `byte` of every block as one value of numpy's type `kind`, [out, blocks].

    numpy goes over such a view ten times faster than over as many short rows of bytes.
    """
    block = np.dtype({"names": ["field"], "formats": [kind], "offsets": [byte], "itemsize": blocks.shape[-1]})
    return blocks.view(block)["field"][..., 0]


def rotary_rows(num_heads: int, head_dim: int) -> NDArray[np.int64]:
    """Which stored row is row r of a q or k matrix of the llama architecture.

    The file keeps rotary pairs side by side, the model takes them from the two halves of a head. One head of 6:

        stored  a0 b0 a1 b1 a2 b2      wanted  a0 a1 a2 b0 b1 b2      result  0 2 4 1 3 5
    """
    stored = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)
