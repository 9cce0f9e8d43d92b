"""Llama 1 to 3.3 and what shares its architecture, SmolLM2 and TinyLlama among them."""

from __future__ import annotations

from headrace.config.model import ModelConfig
from headrace.kernels.ops import Kernels
from headrace.layers.decoder import Decoder
from headrace.models.decoder import load_decoder
from headrace.weights.checkpoint import Checkpoint, Progress


def load(
    config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
) -> Decoder:
    """No biases, unless `attention_bias` (on q, k, v and the output alike) or `mlp_bias` asks for them."""
    return load_decoder(
        config,
        checkpoint,
        kernels,
        max_positions,
        progress,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
