"""Mistral 7B and what shares its architecture (Ministral, Mistral Nemo, Mistral Small's text)."""

from __future__ import annotations

from headrace.config.model import ModelConfig
from headrace.kernels.ops import Kernels
from headrace.layers.decoder import Decoder
from headrace.models.decoder import load_decoder
from headrace.weights.checkpoint import Checkpoint, Progress


def load(
    config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
) -> Decoder:
    """Llama without biases; the early ones have a window in every layer."""
    return load_decoder(config, checkpoint, kernels, max_positions, progress)
