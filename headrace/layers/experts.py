"""A mixture of experts: a router scores them for each row, and the row goes through the best few."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.model import ModelConfig
from headrace.kernels.ops import Buffer, Handle, Kernels
from headrace.layers.linear import Linear
from headrace.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Experts:
    router: Linear
    gate_up: Handle
    down: Handle
    top_k: int
    normalize: bool

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, kernels: Kernels, name: str, config: ModelConfig, parts: tuple[str, str, str]
    ) -> Experts:
        """`name` is the module that holds `gate` (the router) and `experts`; `parts` are an expert's projections:
        gate, up and down. The router is small and decides much: it is never quantised here."""
        gate, up, down = parts
        experts = [f"{name}.experts.{expert}" for expert in range(config.num_experts)]
        return cls(
            Linear.load(checkpoint, kernels, [f"{name}.gate"], exact=True),
            kernels.prepare_experts(checkpoint.stacked([f"{e}.{gate}.weight", f"{e}.{up}.weight"]) for e in experts),
            kernels.prepare_experts(checkpoint.matrix(f"{e}.{down}.weight") for e in experts),
            config.num_experts_per_token,
            config.normalize_expert_weights,
        )

    def forward(self, kernels: Kernels, x: Buffer) -> Buffer:
        scores = self.router.forward(kernels, x)
        return kernels.experts(x, scores, self.gate_up, self.down, top_k=self.top_k, normalize=self.normalize)
