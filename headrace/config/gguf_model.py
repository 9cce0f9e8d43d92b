"""What a GGUF file says of its model, written in Hugging Face's words: the config dictionary and tensor names.

Everything after this reads one vocabulary only. Two things differ in the file and are not hidden here: rows of
q and k of the llama architecture are permuted for interleaved rotary (the weight reader undoes it), and the
scaling of Llama 3.x is stored as a tensor of factors instead of its parameters, which are recovered here.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

from headrace.config.errors import ConfigError
from headrace.config.gguf_format import GGUFHeader

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

# Llama 3.1, 3.2 and 3.3 share these; only the factor (8 or 32) differs.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}

# Chat models end a turn with one of these even where the file names another end-of-sequence token.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>")
_CONTROL = 3


def hugging_face_name(name: str) -> str | None:
    """blk.7.attn_q.weight -> model.layers.7.self_attn.q_proj.weight; None for a name with no counterpart."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return None


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
            "Use a Q8_0, Q4_0, Q4_1 or F16 file of the same model."
        )

    def key(name: str) -> object:
        value = metadata.get(f"{architecture}.{name}")
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            return value[0]
        return value

    if key("expert_count"):
        raise ConfigError(f"{path}: the model is a mixture of {key('expert_count')} experts, which is not supported.")
    embedding = tensors.get("token_embd.weight")
    heads, hidden = key("attention.head_count"), key("embedding_length")
    key_length = key("attention.key_length")
    if key_length is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        key_length = hidden // heads
    for name in ("attention.value_length", "rope.dimension_count"):
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
    scaling = key("rope.scaling.type")
    if scaling is None and key("rope.scale_linear") is not None:
        scaling, factor = "linear", key("rope.scale_linear")
    else:
        factor = key("rope.scaling.factor")
    if scaling not in (None, "none") and not (scaling == "linear" and factor == 1.0):
        raw["rope_scaling"] = {"rope_type": scaling, "factor": factor}
    if _ROPE_FACTORS in tensors:
        raw["rope_scaling"] = _llama3_scaling(path, header, raw)
    return raw


def end_token_ids(header: GGUFHeader) -> list[int]:
    """Ids that end an answer: end of sequence, of turn and of message, each once."""
    metadata = header.metadata
    found: list[object] = [metadata.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list) and len(tokens) == len(types):
        present = [tokens.index(name) for name in _END_OF_TURN if name in tokens]
        found.extend(token_id for token_id in present if types[token_id] == _CONTROL)
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


def _llama3_scaling(path: Path, header: GGUFHeader, raw: dict[str, object]) -> dict[str, object]:
    """Recover the parameters whose factors the file stores, and check that they give these factors."""
    tensor = header.tensors[_ROPE_FACTORS]
    theta, head_dim = raw.get("rope_theta") or 10000.0, raw.get("head_dim")
    if not isinstance(theta, int | float) or not 1 < theta < 1e12:
        raise ConfigError(f"{path}: rope.freq_base is {theta!r}, not a number above 1.")
    if tensor.type != "F32" or not isinstance(head_dim, int) or tensor.shape != (head_dim // 2,):
        raise ConfigError(f"{path}: {_ROPE_FACTORS} is {tensor.type} of shape {tensor.shape}, not F32 [head_dim / 2].")
    with path.open("rb") as file:
        file.seek(tensor.offset)
        factors = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.num_bytes))
    largest = float(max(factors))
    if not 0.9 < min(factors) <= largest < 1e6:
        raise ConfigError(f"{path}: {_ROPE_FACTORS} holds {min(factors):g} to {largest:g}, which are no factors.")
    low, high, length = _LLAMA3.values()
    for index, stored in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = min(1.0, max(0.0, (length / wavelength - low) / (high - low)))
        expected = 1 / ((1 - smooth) / largest + smooth)
        if not math.isclose(stored, expected, rel_tol=1e-3):
            raise ConfigError(
                f"{path}: the rotary factors of {_ROPE_FACTORS} are not those of Llama 3 (factor {largest:g}: entry "
                f"{index} is {stored:g}, expected {expected:g}); other long-context scalings are not supported."
            )
    return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
