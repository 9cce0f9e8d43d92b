"""BERT, RoBERTa and what shares their architecture: MiniLM, BGE, E5, GTE, XLM-R, and cross-encoders made of them."""

from __future__ import annotations

import numpy as np

from headrace.config.encoder import HEADS
from headrace.config.model import ModelConfig
from headrace.kernels.ops import Kernels
from headrace.kernels.weight import Weight
from headrace.layers.encoder import ClassificationHead, Encoder, EncoderBlock
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm
from headrace.weights.checkpoint import Checkpoint, Progress


def load(
    config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
) -> Encoder:
    """A classification head is there if `num_labels` says so."""

    def linear(*names: str) -> Linear:
        return Linear.load(checkpoint, kernels, names, bias=True)

    def norm(name: str) -> LayerNorm:
        return LayerNorm.load(checkpoint, kernels, name, config.rms_norm_eps)

    words = kernels.prepare_embedding(checkpoint.matrix("embeddings.word_embeddings.weight"))
    positions = kernels.prepare_embedding(_positions(config, checkpoint))
    blocks = []
    for layer in range(config.num_layers):
        name = f"encoder.layer.{layer}"
        blocks.append(
            EncoderBlock(
                num_heads=config.num_heads,
                head_dim=config.head_dim,
                qkv=linear(*(f"{name}.attention.self.{part}" for part in ("query", "key", "value"))),
                attention_output=linear(f"{name}.attention.output.dense"),
                attention_norm=norm(f"{name}.attention.output.LayerNorm"),
                inner=linear(f"{name}.intermediate.dense"),
                outer=linear(f"{name}.output.dense"),
                mlp_norm=norm(f"{name}.output.LayerNorm"),
            )
        )
        progress(checkpoint.read_bytes, checkpoint.total_bytes)
    head = None
    if config.num_labels:
        dense, output = HEADS[config.family]
        head = ClassificationHead(linear(dense), linear(output))
    progress(checkpoint.total_bytes, checkpoint.total_bytes)
    return Encoder(words, positions, norm("embeddings.LayerNorm"), tuple(blocks), head)


def _positions(config: ModelConfig, checkpoint: Checkpoint) -> Weight:
    """[token types * positions, hidden]: each position with the row of the first type added, then of the second."""
    table = checkpoint.matrix("embeddings.position_embeddings.weight").to_float32()[config.first_position :]
    types = checkpoint.matrix("embeddings.token_type_embeddings.weight").to_float32()
    values = np.concatenate([table + row for row in types])
    return Weight((values.shape[0], values.shape[1]), values)
