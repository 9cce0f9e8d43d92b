"""Token embeddings, as they are or all multiplied with one number."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kernels.ops import BatchHandle, Buffer, Handle, Kernels
from headrace.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Embedding:
    table: Handle
    scale: float | None = None

    @classmethod
    def load(cls, checkpoint: Checkpoint, kernels: Kernels, name: str, *, scale: float | None = None) -> Embedding:
        return cls(kernels.prepare_embedding(checkpoint.matrix(f"{name}.weight")), scale)

    def forward(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        rows = kernels.embedding(self.table, batch)
        return rows if self.scale is None else kernels.scale(rows, self.scale)
