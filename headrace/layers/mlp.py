"""The gated feed-forward part of a block: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kernels.ops import Buffer, Kernels
from headrace.layers.linear import Linear
from headrace.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class GatedMLP:
    gate_up: Linear
    down: Linear

    @classmethod
    def load(cls, checkpoint: Checkpoint, kernels: Kernels, name: str, *, bias: bool) -> GatedMLP:
        """`name` is the module that holds gate_proj, up_proj and down_proj."""
        gate_up = Linear.load(checkpoint, kernels, [f"{name}.gate_proj", f"{name}.up_proj"], bias=bias)
        return cls(gate_up, Linear.load(checkpoint, kernels, [f"{name}.down_proj"], bias=bias))

    def forward(self, kernels: Kernels, x: Buffer) -> Buffer:
        return self.down.forward(kernels, kernels.silu_mul(self.gate_up.forward(kernels, x)))
