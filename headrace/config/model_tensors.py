"""The tensors that a plain checkpoint of an architecture must have: names and shapes, each family's own."""

from __future__ import annotations

from headrace.config.encoder import encoder_shapes
from headrace.config.model import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def needed_tensors(config: ModelConfig) -> Shapes:
    """Name and shape ([out, in]) of every tensor, as Hugging Face names them.

    Biases: qwen2 has them on q, k and v; others with `attention_bias` on q, k, v and o.
    """
    if config.is_encoder:
        return encoder_shapes(config)
    hidden = config.hidden_size
    needed: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        parts = {**_norms(config), **_attention(config), **_feed_forward(config, layer)}
        needed |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    needed["model.norm.weight"] = (hidden,)
    if config.has_output and not config.tie_word_embeddings:
        needed["lm_head.weight"] = (config.vocab_size, hidden)
    return needed


def _norms(config: ModelConfig) -> Shapes:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.family == "gemma3":
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {f"{name}.weight": (config.hidden_size,) for name in names}


def _attention(config: ModelConfig) -> Shapes:
    hidden = config.hidden_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden)}
    if config.family == "phi3":
        projections = {"qkv": (q_width + 2 * kv_width, hidden)}
    projections["o"] = (hidden, q_width)
    biased = "qkv" if config.family == "qwen2" else "qkvo" if config.attention_bias else ""
    shapes: Shapes = {}
    for name, shape in projections.items():
        shapes[f"self_attn.{name}_proj.weight"] = shape
        if name in biased:
            shapes[f"self_attn.{name}_proj.bias"] = shape[:1]
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes


def _feed_forward(config: ModelConfig, layer: int) -> Shapes:
    hidden, ffn = config.hidden_size, config.intermediate_size
    if config.has_experts(layer):
        ffn = config.expert_intermediate_size
        mixtral = config.family == "mixtral"
        module = "block_sparse_moe" if mixtral else "mlp"
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        shapes: Shapes = {f"{module}.gate.weight": (config.num_experts, hidden)}
        for expert in range(config.num_experts):
            for name, shape in ((gate, (ffn, hidden)), (up, (ffn, hidden)), (down, (hidden, ffn))):
                shapes[f"{module}.experts.{expert}.{name}.weight"] = shape
        return shapes
    if config.family == "phi3":
        return {"mlp.gate_up_proj.weight": (2 * ffn, hidden), "mlp.down_proj.weight": (hidden, ffn)}
    shapes = {}
    for name, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
        shapes[f"mlp.{name}_proj.weight"] = shape
        if config.mlp_bias:
            shapes[f"mlp.{name}_proj.bias"] = shape[:1]
    return shapes
