"""A projection: one weight, or several that read the same input stacked into one product, and a bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.kernels.ops import Buffer, Handle, Kernels
from headrace.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Linear:
    """y [rows, out] = x [rows, in] @ weight.T + bias."""

    weight: Handle
    bias: Handle | None = None

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, kernels: Kernels, names: Sequence[str], *, bias: bool = False, exact: bool = False
    ) -> Linear:
        """`names` are modules ("model.layers.0.mlp.up_proj"), their outputs side by side in this order."""
        weight = kernels.prepare_weight(checkpoint.stacked([f"{name}.weight" for name in names]), exact)
        if not bias:
            return cls(weight)
        values = np.concatenate([checkpoint.vector(f"{name}.bias") for name in names])
        return cls(weight, kernels.prepare_vector(values))

    def forward(self, kernels: Kernels, x: Buffer) -> Buffer:
        return kernels.linear(x, self.weight, self.bias)
