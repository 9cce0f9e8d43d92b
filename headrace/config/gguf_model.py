"""What a GGUF file says of its model, written in Hugging Face's words: the config dictionary.

Everything after this reads one vocabulary only. Two things differ in the file and are not hidden here, the weight
reader undoes them: rows of q and k of the llama architecture are permuted for interleaved rotary, and the norms
of gemma3 have 1 added to their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.config.errors import ConfigError
from headrace.config.gguf_format import GGUFHeader, Strings
from headrace.config.gguf_rope import rope_scaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""Mistral's files say llama, and so do Mixtral's, which have experts."""
SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

_GEMMA3_27B_LAYERS = 62

# Chat models end a turn with one of these even where the file names another end-of-sequence token.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>")
_CONTROL = 3


def config_dictionary(path: Path, header: GGUFHeader) -> dict[str, object]:
    """The config.json this file would have had. Raises ConfigError for what is not supported, by name."""
    metadata, tensors = header.metadata, header.tensors
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: the GGUF architecture {architecture!r} is not supported; known are {', '.join(ARCHITECTURES)}."
        )
    if metadata.get("split.count", 0) not in (0, 1):
        raise ConfigError(
            f"{path} is one of {metadata['split.count']} parts; merge them first with "
            "`llama-gguf-split --merge FIRST_PART MERGED.gguf`."
        )
    unsupported = [t for t in tensors.values() if t.type not in SUPPORTED_TYPES]
    if unsupported:
        types = sorted({t.type for t in unsupported})
        raise ConfigError(
            f"{path}: {len(unsupported)} of {len(tensors)} tensors have the type {', '.join(types)} "
            f"(first {unsupported[0].name}), which is not supported; known are {', '.join(SUPPORTED_TYPES)}. "
            "Use a Q4_K_M, Q6_K, Q8_0 or F16 file of the same model."
        )

    def key(name: str) -> object:
        value = metadata.get(f"{architecture}.{name}")
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            return value[0]
        return value

    if key("expert_count") and architecture not in ("llama", "qwen3moe"):
        raise ConfigError(
            f"{path}: a {architecture} model that is a mixture of {key('expert_count')} experts is not supported; "
            "known are llama (Mixtral) and qwen3moe."
        )
    embedding = tensors.get("token_embd.weight")
    heads, hidden = key("attention.head_count"), key("embedding_length")
    key_length = key("attention.key_length")
    if key_length is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        key_length = hidden // heads
    # Rows of llama's heads are stored for rotary over all of them.
    whole = (
        ("attention.value_length", "rope.dimension_count") if architecture == "llama" else ("attention.value_length",)
    )
    for name in whole:
        if key(name) is not None and key(name) != key_length:
            raise ConfigError(f"{path}: {name} is {key(name)!r}, but only the length of a key ({key_length}) works.")
    raw: dict[str, object] = {
        "architectures": [ARCHITECTURES[str(architecture)]],
        "vocab_size": embedding.shape[0] if embedding else key("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv"),
        "head_dim": key_length,
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_theta": key("rope.freq_base"),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(header),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(header),
        "quantization_config": {"quant_method": "gguf"},
    }
    scaling = rope_scaling(path, header, key, theta=raw["rope_theta"], head_dim=key_length)
    if scaling is not None:
        raw["rope_scaling"] = scaling
    rotated = key("rope.dimension_count")
    if isinstance(rotated, int) and isinstance(key_length, int) and rotated != key_length:
        raw["partial_rotary_factor"] = rotated / max(key_length, 1)
    return raw | _own_keys(str(architecture), key, raw)


def _own_keys(architecture: str, key: Callable[[str], object], raw: dict[str, object]) -> dict[str, object]:
    """What config.json has for one family only, and what the file leaves to the program that reads it."""
    window = key("attention.sliding_window") or None
    if architecture == "llama" and key("expert_count"):
        return {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": key("expert_count"),
            "num_experts_per_tok": key("expert_used_count"),
        }
    if architecture == "qwen3moe":
        return {
            "num_experts": key("expert_count"),
            "num_experts_per_tok": key("expert_used_count"),
            "moe_intermediate_size": key("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    if architecture == "phi3":
        return {"sliding_window": window}
    if architecture == "gemma3":
        heads, hidden, length = raw["num_attention_heads"], raw["hidden_size"], raw["head_dim"]
        scalar = length
        if raw["num_hidden_layers"] == _GEMMA3_27B_LAYERS and isinstance(heads, int) and isinstance(hidden, int):
            scalar = hidden // max(heads, 1)
        found = {
            "sliding_window": window,
            "query_pre_attn_scalar": scalar,
            "rope_local_base_freq": key("rope.freq_base_swa"),
            "attn_logit_softcapping": key("attn_logit_softcapping"),
            "final_logit_softcapping": key("final_logit_softcapping"),
        }
        return {name: value for name, value in found.items() if value is not None or name == "sliding_window"}
    return {}


def end_token_ids(header: GGUFHeader) -> list[int]:
    """Ids that end an answer: end of sequence, of turn and of message, each once."""
    metadata = header.metadata
    found: list[object] = [metadata.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list | Strings) and isinstance(types, list) and len(tokens) == len(types):
        named = {tokens[token_id]: token_id for token_id, kind in enumerate(types) if kind == _CONTROL}
        found.extend(named[name] for name in _END_OF_TURN if name in named)
    return list(dict.fromkeys(v for v in found if isinstance(v, int)))


def chat_templates(header: GGUFHeader) -> dict[str, str]:
    """Templates by name; the plain one is "default"."""
    prefix = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    for key, value in header.metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(prefix + ".")):
            templates[key[len(prefix) + 1 :] or "default"] = value
    return templates


def _dtype(header: GGUFHeader) -> str:
    """The checkpoint's own compute dtype, by its matrices; quantised ones count as bfloat16."""
    types = {t.type for t in header.tensors.values() if len(t.shape) > 1}
    return {frozenset(["F32"]): "float32", frozenset(["F16"]): "float16"}.get(frozenset(types), "bfloat16")
