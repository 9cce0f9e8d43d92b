"""A Llama small enough to load in milliseconds: random weights, a byte tokenizer or the bundled one, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.small_models import END_TOKEN_ID, VOCAB_SIZE, write_bundled_tokenizer, write_byte_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 2, 16, 128


def tiny_llama(
    folder: Path,
    *,
    num_layers: int = 2,
    max_positions: int = 512,
    seed: int = 0,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    ffn: int = FFN,
    bundled_tokenizer: bool = False,
) -> Path:
    """Write config.json, model.safetensors (float32), tokenizer and chat template into `folder`."""
    vocab_size, end_token_id = VOCAB_SIZE, END_TOKEN_ID
    if bundled_tokenizer:
        vocab_size, end_token_id = write_bundled_tokenizer(folder)
    else:
        write_byte_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": ffn,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": end_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)

    def matrix(out: int, width: int) -> np.ndarray:
        return random.normal(0.0, 0.3, (out, width)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(vocab_size, HIDDEN),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            prefix + "self_attn.q_proj.weight": matrix(HEADS * head_dim, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(kv_heads * head_dim, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(kv_heads * head_dim, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head_dim),
            prefix + "mlp.gate_proj.weight": matrix(ffn, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(ffn, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, ffn),
        }
    save_file(tensors, folder / "model.safetensors")
    return folder
