"""Qwen3 with a mixture of experts in all or most layers."""

from __future__ import annotations

from headrace.config.model import ModelConfig
from headrace.kernels.ops import Kernels
from headrace.layers.decoder import Decoder, FeedForward
from headrace.layers.experts import Experts
from headrace.layers.mlp import GatedMLP
from headrace.models.decoder import load_decoder
from headrace.weights.checkpoint import Checkpoint, Progress


def load(
    config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
) -> Decoder:
    """As Qwen3 but for the feed-forward part, which is dense in the layers that the configuration lists."""
    bias = config.attention_bias

    def feed_forward(layer: int, name: str) -> FeedForward:
        if config.has_experts(layer):
            parts = ("gate_proj", "up_proj", "down_proj")
            return Experts.load(checkpoint, kernels, f"{name}.mlp", config, parts)
        return GatedMLP.load(checkpoint, kernels, f"{name}.mlp")

    return load_decoder(
        config, checkpoint, kernels, max_positions, progress, qkv_bias=bias, output_bias=bias, mlp=feed_forward
    )
