"""Qwen3 (dense)."""

from __future__ import annotations

from headrace.config.model import ModelConfig
from headrace.kernels.ops import Kernels
from headrace.layers.decoder import Decoder
from headrace.models.decoder import load_decoder
from headrace.weights.checkpoint import Checkpoint, Progress


def load(
    config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
) -> Decoder:
    """The heads of q and k are normalised before they are rotated; biases only where `attention_bias` asks."""
    bias = config.attention_bias
    return load_decoder(config, checkpoint, kernels, max_positions, progress, qkv_bias=bias, output_bias=bias)
