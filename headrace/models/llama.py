"""Llama 1 to 3.3 and what shares its architecture, SmolLM2 and TinyLlama among them."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.model import ModelConfig
from headrace.kernels.ops import BatchHandle, Buffer, Kernels
from headrace.layers.decoder import Decoder
from headrace.models.decoder import load_decoder
from headrace.weights.checkpoint import Checkpoint, Progress


@dataclass(frozen=True, slots=True)
class Llama:
    """No biases, unless `attention_bias` (on q, k, v and the output alike) or `mlp_bias` asks for them."""

    decoder: Decoder

    @classmethod
    def load(
        cls, config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
    ) -> Llama:
        decoder = load_decoder(
            config,
            checkpoint,
            kernels,
            max_positions,
            progress,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
        return cls(decoder)

    def hidden(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        return self.decoder.hidden(kernels, batch)

    def forward(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        return self.decoder.forward(kernels, batch)
