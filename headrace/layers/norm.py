"""Root-mean-square normalisation, alone or of a sum that is wanted as well (the residual stream)."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kernels.ops import Buffer, Handle, Kernels
from headrace.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: Handle
    eps: float

    @classmethod
    def load(cls, checkpoint: Checkpoint, kernels: Kernels, name: str, eps: float) -> RMSNorm:
        return cls(kernels.prepare_vector(checkpoint.vector(f"{name}.weight")), eps)

    def forward(self, kernels: Kernels, x: Buffer) -> Buffer:
        return kernels.rms_norm(x, self.weight, self.eps)

    def of_sum(self, kernels: Kernels, x: Buffer, residual: Buffer) -> tuple[Buffer, Buffer]:
        """(norm(x + residual), x + residual)."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)
