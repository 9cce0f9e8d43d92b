"""Builds the decoder that Llama and its relatives share, from the weight names they share."""

from __future__ import annotations

from collections.abc import Callable

from headrace.config.model import ModelConfig
from headrace.kernels.ops import Kernels
from headrace.layers.attention import Attention
from headrace.layers.decoder import Decoder, DecoderBlock, FeedForward
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import Rotary
from headrace.weights.checkpoint import Checkpoint, Progress

Block = Callable[[int, str], DecoderBlock]
"""Makes the block of a layer, whose module has this name."""


def load_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Kernels,
    max_positions: int,
    progress: Progress,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    fused: bool = False,
    mlp: Callable[[int, str], FeedForward] | None = None,
    mlp_bias: bool = False,
) -> Decoder:
    """Two norms a block, one rotary for all. What tells the families apart are biases, projections that are `fused`
    in the checkpoint, and the feed-forward part: `mlp(layer, name of the block)`, without it the gated one."""
    rotary = Rotary.build(kernels, config, max_positions)

    def gated(layer: int, name: str) -> FeedForward:
        return GatedMLP.load(checkpoint, kernels, f"{name}.mlp", bias=mlp_bias, fused=fused)

    feed_forward = mlp or gated

    def block(layer: int, name: str) -> DecoderBlock:
        return DecoderBlock(
            attention_norm=RMSNorm.load(checkpoint, kernels, f"{name}.input_layernorm", config.rms_norm_eps),
            attention=Attention.load(
                checkpoint,
                kernels,
                f"{name}.self_attn",
                layer=layer,
                config=config,
                rotary=rotary,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                fused=fused,
            ),
            mlp_norm=RMSNorm.load(checkpoint, kernels, f"{name}.post_attention_layernorm", config.rms_norm_eps),
            mlp=feed_forward(layer, name),
        )

    embedding = Embedding.load(checkpoint, kernels, "model.embed_tokens")
    norm = RMSNorm.load(checkpoint, kernels, "model.norm", config.rms_norm_eps)
    return joined(config, checkpoint, kernels, progress, embedding, block, norm)


def joined(
    config: ModelConfig,
    checkpoint: Checkpoint,
    kernels: Kernels,
    progress: Progress,
    embedding: Embedding,
    block: Block,
    norm: RMSNorm,
) -> Decoder:
    """The parts as a decoder with the output matrix added, which may be the embedding's. `progress` hears of
    every block."""
    blocks = []
    for layer in range(config.num_layers):
        blocks.append(block(layer, f"model.layers.{layer}"))
        progress(checkpoint.read_bytes, checkpoint.total_bytes)
    output: Linear | None
    if not config.has_output:
        output = None
    elif config.tie_word_embeddings:
        output = Linear(kernels.prepare_tied(embedding.table))
    else:
        output = Linear.load(checkpoint, kernels, ["lm_head"])
    decoder = Decoder(embedding, tuple(blocks), norm, output)
    # Files may hold tensors that no model reads, so the last word is the total.
    progress(checkpoint.total_bytes, checkpoint.total_bytes)
    return decoder
