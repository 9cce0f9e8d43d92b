"""Builds the decoder that Llama and its relatives share, from the weight names they share."""

from __future__ import annotations

from headrace.config.model import ModelConfig
from headrace.kernels.ops import Kernels
from headrace.layers.attention import Attention
from headrace.layers.decoder import Decoder, DecoderBlock
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import Rotary
from headrace.weights.checkpoint import Checkpoint, Progress


def load_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Kernels,
    max_positions: int,
    progress: Progress,
    *,
    qkv_bias: bool,
    output_bias: bool,
    mlp_bias: bool,
) -> Decoder:
    """The biases are what tells the families apart. `progress` hears of every block."""
    rotary = Rotary.build(kernels, config, max_positions)
    embedding = Embedding.load(checkpoint, kernels, "model.embed_tokens")
    blocks = []
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        attention = Attention.load(
            checkpoint,
            kernels,
            f"{name}.self_attn",
            layer=layer,
            config=config,
            rotary=rotary,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
        )
        block = DecoderBlock(
            attention_norm=RMSNorm.load(checkpoint, kernels, f"{name}.input_layernorm", config.rms_norm_eps),
            attention=attention,
            mlp_norm=RMSNorm.load(checkpoint, kernels, f"{name}.post_attention_layernorm", config.rms_norm_eps),
            mlp=GatedMLP.load(checkpoint, kernels, f"{name}.mlp", bias=mlp_bias),
        )
        blocks.append(block)
        progress(checkpoint.read_bytes, checkpoint.total_bytes)
    norm = RMSNorm.load(checkpoint, kernels, "model.norm", config.rms_norm_eps)
    output = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    decoder = Decoder(embedding, tuple(blocks), norm, Linear.load(checkpoint, kernels, [output]))
    # Files may hold tensors that no model reads, so the last word is the total.
    progress(checkpoint.total_bytes, checkpoint.total_bytes)
    return decoder
