"""Qwen2 and Qwen2.5 (dense, without sliding window)."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.model import ModelConfig
from headrace.kernels.ops import BatchHandle, Buffer, Kernels
from headrace.layers.decoder import Decoder
from headrace.models.decoder import load_decoder
from headrace.weights.checkpoint import Checkpoint, Progress


@dataclass(frozen=True, slots=True)
class Qwen2:
    """Biases on q, k and v, and nowhere else."""

    decoder: Decoder

    @classmethod
    def load(
        cls, config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
    ) -> Qwen2:
        decoder = load_decoder(
            config,
            checkpoint,
            kernels,
            max_positions,
            progress,
            qkv_bias=True,
            output_bias=False,
            mlp_bias=False,
        )
        return cls(decoder)

    def hidden(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        return self.decoder.hidden(kernels, batch)

    def forward(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        return self.decoder.forward(kernels, batch)
