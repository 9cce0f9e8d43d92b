"""Token embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kernels.ops import BatchHandle, Buffer, Handle, Kernels
from headrace.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Embedding:
    table: Handle

    @classmethod
    def load(cls, checkpoint: Checkpoint, kernels: Kernels, name: str) -> Embedding:
        return cls(kernels.prepare_embedding(checkpoint.matrix(f"{name}.weight")))

    def forward(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        return kernels.embedding(self.table, batch)
