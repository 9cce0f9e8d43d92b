"""Phi-3, Phi-3.5 and Phi-4 (dense, text)."""

from __future__ import annotations

from headrace.config.model import ModelConfig
from headrace.kernels.ops import Kernels
from headrace.layers.decoder import Decoder
from headrace.models.decoder import load_decoder
from headrace.weights.checkpoint import Checkpoint, Progress


def load(
    config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
) -> Decoder:
    """Llama with q, k and v in one matrix of the checkpoint, and gate and up in another."""
    return load_decoder(config, checkpoint, kernels, max_positions, progress, fused=True)
