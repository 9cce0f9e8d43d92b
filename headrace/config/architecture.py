"""From a checkpoint's own description (the dictionary of config.json) to ModelConfig.

There is one road: a GGUF file's metadata is first written as the same dictionary. What is not implemented is
refused here by name, before anything is loaded, instead of giving garbage later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.config.encoder import ENCODER_FAMILIES, ENCODERS, encoder_config
from headrace.config.errors import ConfigError
from headrace.config.json_fields import JsonFields
from headrace.config.model import ModelConfig
from headrace.config.other_architecture import OTHER_FAMILY, is_other, other_config
from headrace.config.rope import read_rope

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Phi3ForCausalLM": "phi3",
    "Gemma3ForCausalLM": "gemma3",
}
WITH_IMAGES = {"Gemma3ForConditionalGeneration": "gemma3", "Mistral3ForConditionalGeneration": "mistral"}
"""Models of text and images whose text part is one of the families; that part is served."""
BARE = {f"{name.removesuffix('ForCausalLM')}Model": family for name, family in ARCHITECTURES.items()}
"""Decoders that were saved without an output matrix, as embedding models are."""
KNOWN_FAMILIES = tuple(ARCHITECTURES.values())
MAX_LAYERS = 4096
DTYPES = ("float32", "float16", "bfloat16")

# What a config.json that leaves a key out means by it, where that differs from one family to another.
_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 2,
    },
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    "phi3": {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "gemma3": {
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
}
_ENCODER_TYPES = {"bert": "bert", "roberta": "roberta", "xlm-roberta": "roberta", "camembert": "roberta"}
_BIAS_IS_A_SWITCH = ("llama", "qwen3", "qwen3_moe", "gemma3")
_QK_NORM = ("qwen3", "qwen3_moe", "gemma3")
_WINDOW_IS_A_SWITCH = ("qwen2", "qwen3", "qwen3_moe")
"""Families whose sliding_window counts only with use_sliding_window."""


def model_config(raw: Mapping[str, object], source: str, eos_token_ids: Iterable[int] = ()) -> ModelConfig:
    """Check and convert the dictionary of a config.json.

    `source` names where it came from, for messages; `eos_token_ids` are added to the dictionary's own.
    Raises ConfigError for a family or feature that is not implemented and for values that cannot be.
    """
    family = _family(raw, source)
    if family == OTHER_FAMILY:
        eos = [*token_ids(raw.get("eos_token_id"), source), *eos_token_ids]
        dtype, quantization = _dtype(raw, source), _quantization(raw, source)
        return other_config(raw, source, dtype=dtype, eos_token_ids=eos, quantization=quantization)
    if family in ENCODER_FAMILIES:
        if (method := _quantization(raw, source)) is not None:
            raise ConfigError(f"{source}: an encoder quantised with {method!r} is not supported; use plain weights.")
        return encoder_config(raw, source, family, _dtype(raw, source))
    has_output = not _is_bare(raw)
    raw = {**_DEFAULTS[family], **_text_part(raw, source)}
    fields = JsonFields(raw, source)
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{source}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}."
        )
    head_dim = fields.size("head_dim", 0)
    if not head_dim:
        if hidden_size % num_heads:
            raise ConfigError(f"{source}: hidden_size {hidden_size} is not a multiple of {num_heads} heads.")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(f"{source}: head_dim {head_dim} is odd; rotary embeddings need an even one.")
    _check_features(raw, family, source)
    num_layers = fields.size("num_hidden_layers", limit=MAX_LAYERS)
    window, sliding = _sliding_layers(raw, fields, family, num_layers)
    rope = read_rope(raw, source, head_dim=head_dim, max_positions=fields.size("max_position_embeddings"))
    gemma = family == "gemma3"
    experts, per_token, expert_size, dense = _experts(fields, family, num_layers)
    return ModelConfig(
        family=family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size", expert_size or None),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=rope.max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        attention_bias=family == "qwen2" or (family in _BIAS_IS_A_SWITCH and fields.flag("attention_bias")),
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=_dtype(raw, source),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys([*token_ids(raw.get("eos_token_id"), source), *eos_token_ids])),
        quantization=_quantization(raw, source),
        sliding_window=window,
        sliding_layers=sliding,
        qk_norm=family in _QK_NORM,
        query_scale=fields.number("query_pre_attn_scalar") ** -0.5 if gemma else None,
        partial_rotary_factor=rope.partial_factor,
        rope_local_theta=rope.local_theta if gemma else None,
        num_experts=experts,
        num_experts_per_token=per_token,
        expert_intermediate_size=expert_size,
        normalize_expert_weights=family == "mixtral" or fields.flag("norm_topk_prob"),
        dense_layers=dense,
        has_output=has_output,
    )


def token_ids(value: object, source: str) -> list[int]:
    """An end-of-sequence entry (an id, a list of ids or null) as a list."""
    ids: list[int] = []
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise ConfigError(f"{source}: eos_token_id is {value!r}, not a token id or a list of them.")
        ids.append(item)
    return ids


def _family(raw: Mapping[str, object], source: str) -> str:
    known = ", ".join([*ARCHITECTURES, *WITH_IMAGES, *ENCODERS])
    architectures = raw.get("architectures")
    if isinstance(architectures, list) and architectures:
        for name in architectures:
            for known_names in (ARCHITECTURES, WITH_IMAGES, ENCODERS, BARE):
                if name in known_names:
                    return known_names[name]
        if is_other(raw):
            return OTHER_FAMILY
        raise ConfigError(f"{source}: the architecture {architectures[0]} is not supported; known are {known}.")
    model_type = raw.get("model_type")
    if model_type in _ENCODER_TYPES:
        return _ENCODER_TYPES[str(model_type)]
    if isinstance(model_type, str) and model_type.removesuffix("_text") in KNOWN_FAMILIES:
        return model_type.removesuffix("_text")
    named = f"the model_type {model_type!r} is not supported" if model_type else "it names no architecture"
    raise ConfigError(f"{source}: {named}; known architectures are {known} (families {', '.join(KNOWN_FAMILIES)}).")


def _is_bare(raw: Mapping[str, object]) -> bool:
    architectures = raw.get("architectures")
    return isinstance(architectures, list) and bool(architectures) and architectures[0] in BARE


def _text_part(raw: Mapping[str, object], source: str) -> dict[str, object]:
    """The description of the text part, which in a model of text and images is an object of its own; what stands
    outside it (all end tokens, the dtype, overrides) wins."""
    text = raw.get("text_config")
    if text is None:
        return dict(raw)
    if not isinstance(text, dict):
        raise ConfigError(f"{source}: text_config is {text!r}, not an object.")
    return {**text, **{name: value for name, value in raw.items() if value is not None or name not in text}}


def _check_features(raw: Mapping[str, object], family: str, source: str) -> None:
    """Refuse what a file of this family could ask for and is not implemented."""
    names = ("hidden_activation", "hidden_act") if family == "gemma3" else ("hidden_act",)
    known = "gelu_pytorch_tanh" if family == "gemma3" else "silu"
    activation = next((raw[name] for name in names if raw.get(name)), known)
    if activation != known:
        raise ConfigError(f"{source}: {names[0]} {activation!r} is not supported; the known one is {known!r}.")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(name):
            raise ConfigError(f"{source}: {name} is {raw[name]!r}, which is not supported; it must be null or false.")
    if family == "llama" and raw.get("use_sliding_window"):
        raise ConfigError(
            f"{source}: use_sliding_window is true, and the llama family has no sliding window. "
            "--hf-overrides '{\"use_sliding_window\": false}' serves it with full attention."
        )


def _sliding_layers(
    raw: Mapping[str, object], fields: JsonFields, family: str, num_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """The window and, for each layer, whether it has it; (None, ()) where every layer sees everything."""
    source = fields.source
    off = family == "llama" or (family in _WINDOW_IS_A_SWITCH and not fields.flag("use_sliding_window"))
    window = None if off or raw.get("sliding_window") is None else fields.size("sliding_window")
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise ConfigError(f"{source}: layer_types is {layer_types!r}, not a list of {num_layers} names.")
        known = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
        other = [t for t in layer_types if t not in known]
        if other:
            raise ConfigError(
                f"{source}: layers of type {other[0]!r} are not supported here; only {' and '.join(known)}."
            )
        sliding = tuple(t == "sliding_attention" for t in layer_types)
    elif window is None:
        return None, ()
    elif family in ("qwen2", "qwen3"):
        first = raw.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ConfigError(f"{source}: max_window_layers is {first!r}, not a whole number.")
        sliding = tuple(layer >= first for layer in range(num_layers))
    elif family == "gemma3":
        pattern = fields.size("sliding_window_pattern", 6)
        sliding = tuple(bool((layer + 1) % pattern) for layer in range(num_layers))
    else:
        sliding = (True,) * num_layers
    return (window, sliding) if any(sliding) else (None, ())


def _experts(fields: JsonFields, family: str, num_layers: int) -> tuple[int, int, int, tuple[int, ...]]:
    """(experts, experts a token, width of an expert, layers without experts); zeros for a dense family."""
    if family == "mixtral":
        experts, size = fields.size("num_local_experts", 8), fields.size("intermediate_size")
        dense: list[int] = []
    elif family == "qwen3_moe":
        # transformers 5 writes the second name.
        experts = fields.size("num_experts", fields.size("num_local_experts", 128))
        size = fields.size("moe_intermediate_size")
        step, listed = fields.size("decoder_sparse_step"), fields.raw.get("mlp_only_layers") or []
        if not isinstance(listed, list):
            raise ConfigError(f"{fields.source}: mlp_only_layers is {listed!r}, not a list of layers.")
        dense = [layer for layer in range(num_layers) if layer in listed or (layer + 1) % step]
    else:
        return 0, 0, 0, ()
    per_token = fields.size("num_experts_per_tok")
    if per_token > experts:
        raise ConfigError(f"{fields.source}: num_experts_per_tok {per_token} is more than the {experts} experts.")
    return experts, per_token, size, tuple(dense)


def _dtype(raw: Mapping[str, object], source: str) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"{source}: the dtype {name!r} is not supported; known are {', '.join(DTYPES)}.")
    return name


def _quantization(raw: Mapping[str, object], source: str) -> str | None:
    value = raw.get("quantization_config") or raw.get("compression_config")
    if not value:
        return None
    method = value.get("quant_method") if isinstance(value, dict) else None
    if not isinstance(method, str):
        raise ConfigError(f"{source}: quantization_config has no quant_method.")
    return method.lower()
