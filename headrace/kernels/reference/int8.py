"""Products with weights of int8 in groups, in whole numbers: the input too is rounded, to 13 bits, group by group.

Both sides are symmetric: 127, or 4095 of the input, for the largest magnitude of a row's group, whose scale is found as
it is multiplied.

    y = sum over groups of (q_x . q_w) * (scale_x * scale_w)

A sum of whole numbers has no order and the groups are added one by one, so a row's bits depend on the row alone,
whatever the matrix library does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.weight import Weight

LARGEST_INPUT = 4095
"""The most for which a group's sum, 4095 * 127 * 32, is below 2 ** 24."""

SMALLEST = 1e-30
"""Groups of smaller magnitudes are zeros: LARGEST_INPUT divided by theirs might be no number."""


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    values: Tensor
    """[groups, group_size, out] int8"""
    scales: Tensor
    """[groups, out] float32"""

    @property
    def num_bytes(self) -> int:
        return self.values.numel() + 4 * self.scales.numel()


def pack_int8(weight: Weight, device: str) -> Int8Matrix:
    """`weight` has 8 bits and no offsets."""
    assert weight.scales is not None
    values = torch.from_numpy(weight.values).view(weight.shape[0], -1, weight.group_size)
    scales = torch.from_numpy(weight.scales)
    return Int8Matrix(values.permute(1, 2, 0).contiguous().to(device), scales.T.contiguous().to(device))


def multiply_int8(x: Tensor, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    """x [rows, in] @ matrix.T + bias -> [rows, out] in x's dtype."""
    num_groups, group_size, out = matrix.values.shape
    groups = x.float().view(-1, num_groups, group_size)
    largest = groups.abs().amax(dim=2)
    # A number divided by a tensor would be the reciprocal times the number: rounded twice.
    inverse = torch.where(largest < SMALLEST, 0.0, torch.full_like(largest, LARGEST_INPUT) / largest)
    whole = (groups * inverse[:, :, None]).round_()
    scales = largest / LARGEST_INPUT
    product = torch.zeros(x.shape[0], out, device=x.device)
    for group in range(num_groups):
        # Below 2 ** 24 float32 holds every whole number.
        sums = whole[:, group] @ matrix.values[group].float()
        product += sums.mul_(matrix.scales[group] * scales[:, group, None])
    return (product if bias is None else product.add_(bias)).to(x.dtype)
