"""Products of rows with a weight, in tiles of known heights, so that no row's bits depend on the others.

A matrix library picks its loops by the shape it is given, and different loops round differently. On a CPU
products are therefore made of tiles of TILE_ROWS rows, the last one filled up with zeros. Other heights save
time, 8 rows for a lone decode, 128 for a long prompt, and are used where they were seen to give the same bits:
the order of the additions does not depend on the numbers, so one look at random ones tells. 70 rows of x:

    rows 0..63 | rows 64..69 and 2 rows of zeros, whose products are thrown away
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from headrace.kernels.reference.int8 import Int8Matrix, multiply_int8
from headrace.kernels.weight import Weight

TILE_ROWS = 32
HEIGHTS = (8, 16, TILE_ROWS, 64, 128)

TrustedHeights = dict[tuple[int, int], dict[int, bool]]
"""By a weight's shape: heights that were looked at, and whether they give the bits of TILE_ROWS."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight ready to multiply: [out, in] as it is, or `packed` by oneDNN for tiles of TILE_ROWS rows."""

    values: Tensor
    out_features: int
    packed: bool
    trusted: dict[int, bool]

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


def pack(
    weight: Weight, device: str, dtype: torch.dtype, multiply_dtype: torch.dtype, trusted: TrustedHeights
) -> Matrix:
    """Round the weight to `dtype` and keep it in `multiply_dtype`, which holds every value of `dtype`.

    Weights of one shape share their entry of `trusted`, which is filled in as heights are first wanted.
    """
    values = torch.from_numpy(weight.to_float32()).to(dtype).to(multiply_dtype)
    heights = trusted.setdefault(weight.shape, {TILE_ROWS: True})
    if device != "cpu":
        return Matrix(values.to(device), weight.shape[0], False, heights)
    if multiply_dtype not in (torch.float32, torch.bfloat16) or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return Matrix(values, weight.shape[0], False, heights)
    return Matrix(torch.ops.mkldnn._reorder_linear_weight(values, TILE_ROWS), weight.shape[0], True, heights)


def multiply(x: Tensor, matrix: Matrix | Int8Matrix, bias: Tensor | None) -> Tensor:
    """x [rows, in] @ matrix.T + bias -> [rows, out] in x's dtype."""
    if isinstance(matrix, Int8Matrix):
        return multiply_int8(x, matrix, bias)
    inputs = x.to(matrix.values.dtype)
    if bias is not None:
        bias = bias.to(matrix.values.dtype)
    if x.device.type != "cpu":
        return linear(inputs, matrix.values, bias).to(x.dtype)
    rows, width = x.shape
    out = torch.empty(rows, matrix.out_features, dtype=x.dtype)
    start = 0
    while start < rows:
        height = _height(rows - start, matrix, width)
        tile = _filled_up(inputs[start : start + height], height)
        product = _multiply_tile(tile, matrix, bias)
        if start == 0 and height == rows:
            return product.to(x.dtype)
        out[start : start + height] = product[: rows - start]
        start += height
    return out


def _height(rows: int, matrix: Matrix, width: int) -> int:
    """Of the next tile. Most of a tile's time goes into the weight, not into the rows: the least that holds them all
    is the fastest, but for the tallest when it would be a quarter empty."""
    height = next((height for height in HEIGHTS if height >= rows), HEIGHTS[-1])
    if height == HEIGHTS[-1] and rows <= height * 3 // 4:
        height = HEIGHTS[-2]
    return height if _trusted(height, matrix, width) else TILE_ROWS


def _trusted(height: int, matrix: Matrix, width: int) -> bool:
    known = matrix.trusted.get(height)
    if known is None:
        known = matrix.trusted[height] = _gives_the_same_bits(height, matrix, width)
    return known


def _gives_the_same_bits(height: int, matrix: Matrix, width: int) -> bool:
    """Does a tile of `height` rows give every row, wherever it lies in the tile, what a tile of TILE_ROWS gives it?"""
    rows = torch.randn(max(height, TILE_ROWS), width, generator=torch.Generator().manual_seed(0))
    rows = rows.to(matrix.values.dtype)
    expected = torch.cat([_multiply_tile(tile.contiguous(), matrix, None) for tile in rows.split(TILE_ROWS)])[:height]
    tile = rows[:height].contiguous()
    turned = _multiply_tile(tile.roll(1, 0).contiguous(), matrix, None).roll(-1, 0)
    return torch.equal(_multiply_tile(tile, matrix, None), expected) and torch.equal(turned, expected)


def _filled_up(tile: Tensor, height: int) -> Tensor:
    """The tile with exactly `height` contiguous rows."""
    if tile.shape[0] == height:
        return tile.contiguous()
    full = tile.new_zeros(height, tile.shape[1])
    full[: tile.shape[0]] = tile
    return full


def _multiply_tile(tile: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    if matrix.packed:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(tile, matrix.values, bias, "none", [], "")
        return product
    return linear(tile, matrix.values, bias)
