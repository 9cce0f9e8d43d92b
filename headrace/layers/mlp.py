"""The gated feed-forward part of a block: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.kernels.ops import Buffer, Kernels
from headrace.layers.linear import Linear
from headrace.weights.checkpoint import Checkpoint

Activation = Literal["silu", "gelu"]


@dataclass(frozen=True, slots=True)
class GatedMLP:
    gate_up: Linear
    down: Linear
    activation: Activation = "silu"

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        kernels: Kernels,
        name: str,
        *,
        bias: bool = False,
        activation: Activation = "silu",
        fused: bool = False,
    ) -> GatedMLP:
        """`name` is the module that holds gate_proj, up_proj and down_proj; `fused`: gate_up_proj and down_proj."""
        inputs = [f"{name}.gate_up_proj"] if fused else [f"{name}.gate_proj", f"{name}.up_proj"]
        gate_up = Linear.load(checkpoint, kernels, inputs, bias=bias)
        return cls(gate_up, Linear.load(checkpoint, kernels, [f"{name}.down_proj"], bias=bias), activation)

    def forward(self, kernels: Kernels, x: Buffer) -> Buffer:
        gated = self.gate_up.forward(kernels, x)
        inner = kernels.gelu_mul(gated) if self.activation == "gelu" else kernels.silu_mul(gated)
        return self.down.forward(kernels, inner)
