"""Qwen2 and Qwen2.5 (dense)."""

from __future__ import annotations

from headrace.config.model import ModelConfig
from headrace.kernels.ops import Kernels
from headrace.layers.decoder import Decoder
from headrace.models.decoder import load_decoder
from headrace.weights.checkpoint import Checkpoint, Progress


def load(
    config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
) -> Decoder:
    """Biases on q, k and v, and nowhere else."""
    return load_decoder(config, checkpoint, kernels, max_positions, progress, qkv_bias=True)
