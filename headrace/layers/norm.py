"""Root-mean-square normalisation, alone or of a sum that is wanted as well (the residual stream); layer norm."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kernels.ops import Buffer, Handle, Kernels
from headrace.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: Handle
    eps: float

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, kernels: Kernels, name: str, eps: float, *, around_one: bool = False
    ) -> RMSNorm:
        """`around_one`: the checkpoint holds how far the weights are from 1, which low precision would lose."""
        values = checkpoint.vector(f"{name}.weight")
        return cls(kernels.prepare_vector(values + 1 if around_one else values, exact=around_one), eps)

    def forward(self, kernels: Kernels, x: Buffer) -> Buffer:
        """Of every part of a row as wide as the weight: the row, or each of its heads."""
        return kernels.rms_norm(x, self.weight, self.eps)

    def of_sum(self, kernels: Kernels, x: Buffer, residual: Buffer) -> tuple[Buffer, Buffer]:
        """(norm(x + residual), x + residual)."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Handle
    bias: Handle
    eps: float

    @classmethod
    def load(cls, checkpoint: Checkpoint, kernels: Kernels, name: str, eps: float) -> LayerNorm:
        weight, bias = (kernels.prepare_vector(checkpoint.vector(f"{name}.{part}")) for part in ("weight", "bias"))
        return cls(weight, bias, eps)

    def forward(self, kernels: Kernels, x: Buffer) -> Buffer:
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)
