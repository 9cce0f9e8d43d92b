"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from headrace.config.model import ModelConfig
from headrace.kernels.ops import Kernels
from headrace.layers.decoder import Decoder
from headrace.layers.experts import Experts
from headrace.models.decoder import load_decoder
from headrace.weights.checkpoint import Checkpoint, Progress


def load(
    config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
) -> Decoder:
    def experts(layer: int, name: str) -> Experts:
        return Experts.load(checkpoint, kernels, f"{name}.block_sparse_moe", config, ("w1", "w3", "w2"))

    return load_decoder(config, checkpoint, kernels, max_positions, progress, mlp=experts)
