"""Products of rows with a weight, in tiles of one fixed height, so that no row's bits depend on the others.

A matrix library picks its loops by the shape it is given, and different loops round differently. On a CPU
every product here has the same shape: 32 rows, the last tile filled up with zeros. 70 rows of x:

    rows 0..31 | rows 32..63 | rows 64..69 and 26 rows of zeros, whose products are thrown away
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from headrace.kernels.weight import Weight

TILE_ROWS = 32


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight ready to multiply: [out, in] as it is, or `packed` by oneDNN for tiles of TILE_ROWS rows."""

    values: Tensor
    out_features: int
    packed: bool

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


def pack(weight: Weight, device: str, dtype: torch.dtype, multiply_dtype: torch.dtype) -> Matrix:
    """Round the weight to `dtype` and keep it in `multiply_dtype`, which holds every value of `dtype`."""
    values = torch.from_numpy(weight.to_float32()).to(dtype).to(multiply_dtype)
    if device != "cpu":
        return Matrix(values.to(device), weight.shape[0], packed=False)
    if multiply_dtype not in (torch.float32, torch.bfloat16) or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return Matrix(values, weight.shape[0], packed=False)
    return Matrix(torch.ops.mkldnn._reorder_linear_weight(values, TILE_ROWS), weight.shape[0], packed=True)


def multiply(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """x [rows, in] @ matrix.T + bias -> [rows, out] in x's dtype."""
    inputs = x.to(matrix.values.dtype)
    if bias is not None:
        bias = bias.to(matrix.values.dtype)
    if x.device.type != "cpu":
        return linear(inputs, matrix.values, bias).to(x.dtype)
    rows, width = x.shape
    if 0 < rows <= TILE_ROWS:
        return _multiply_tile(_filled_up(inputs, width), matrix, bias)[:rows].to(x.dtype)
    out = torch.empty(rows, matrix.out_features, dtype=x.dtype)
    for start in range(0, rows, TILE_ROWS):
        tile = _filled_up(inputs[start : start + TILE_ROWS], width)
        out[start : start + TILE_ROWS] = _multiply_tile(tile, matrix, bias)[: rows - start]
    return out


def _filled_up(tile: Tensor, width: int) -> Tensor:
    """The tile with exactly TILE_ROWS contiguous rows."""
    if tile.shape[0] == TILE_ROWS:
        return tile.contiguous()
    full = tile.new_zeros(TILE_ROWS, width)
    full[: tile.shape[0]] = tile
    return full


def _multiply_tile(tile: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    if matrix.packed:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(tile, matrix.values, bias, "none", [], "")
        return product
    return linear(tile, matrix.values, bias)
