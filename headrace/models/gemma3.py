"""Gemma 3 (text): most layers see a window and turn by a base of their own, every sixth sees everything."""

from __future__ import annotations

from headrace.config.model import ModelConfig
from headrace.kernels.ops import Kernels
from headrace.layers.attention import Attention
from headrace.layers.decoder import Decoder, DecoderBlock
from headrace.layers.embedding import Embedding
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import Rotary
from headrace.models.decoder import joined
from headrace.weights.checkpoint import Checkpoint, Progress


def load(
    config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
) -> Decoder:
    """Four norms a block, weights of norms stored as their distance from 1, embeddings times the root of the width."""
    everywhere = Rotary.build(kernels, config, max_positions)
    nearby = Rotary.build_local(kernels, config, max_positions)

    def norm(name: str) -> RMSNorm:
        return RMSNorm.load(checkpoint, kernels, name, config.rms_norm_eps, around_one=True)

    def block(layer: int, name: str) -> DecoderBlock:
        return DecoderBlock(
            attention_norm=norm(f"{name}.input_layernorm"),
            attention=Attention.load(
                checkpoint,
                kernels,
                f"{name}.self_attn",
                layer=layer,
                config=config,
                rotary=everywhere if config.window(layer) is None else nearby,
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                norms_around_one=True,
            ),
            attention_out_norm=norm(f"{name}.post_attention_layernorm"),
            mlp_norm=norm(f"{name}.pre_feedforward_layernorm"),
            mlp=GatedMLP.load(checkpoint, kernels, f"{name}.mlp", activation="gelu"),
            mlp_out_norm=norm(f"{name}.post_feedforward_layernorm"),
        )

    embedding = Embedding.load(checkpoint, kernels, "model.embed_tokens", scale=config.hidden_size**0.5)
    return joined(config, checkpoint, kernels, progress, embedding, block, norm("model.norm"))
