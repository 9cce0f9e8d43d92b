"""From a checkpoint's own description (the dictionary of config.json) to ModelConfig, and the tensors it implies.

There is one road: a GGUF file's metadata is first written as the same dictionary. What is not implemented is
refused here by name, before anything is loaded, instead of giving garbage later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.config.errors import ConfigError
from headrace.config.model import ModelConfig

KNOWN_FAMILIES = ("llama", "qwen2")

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
ROPE_TYPES = ("default", "linear", "llama3")
MAX_LAYERS = 4096
DTYPES = ("float32", "float16", "bfloat16")


def model_config(raw: Mapping[str, object], source: str, eos_token_ids: Iterable[int] = ()) -> ModelConfig:
    """Check and convert the dictionary of a config.json.

    `source` names where it came from, for messages; `eos_token_ids` are added to the dictionary's own.
    Raises ConfigError for a family or feature that is not implemented and for values that cannot be.
    """
    family = _family(raw, source)
    fields = _Fields(raw, source)
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
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{source}: hidden_act {activation!r} is not supported; the known one is 'silu'.")
    layer_types = raw.get("layer_types")
    other_layers = [t for t in layer_types if t != "full_attention"] if isinstance(layer_types, list) else []
    if raw.get("use_sliding_window"):
        raise ConfigError(
            f"{source}: use_sliding_window is true, and sliding-window attention is not supported yet. "
            '--hf-overrides \'{"use_sliding_window": false, "layer_types": null}\' serves it with full attention.'
        )
    if other_layers:
        raise ConfigError(f"{source}: layers of type {other_layers[0]!r} are not supported; only full_attention.")
    rope_parameters = raw.get("rope_parameters")
    nested = rope_parameters.get("partial_rotary_factor") if isinstance(rope_parameters, dict) else None
    partial = raw.get("partial_rotary_factor") or nested or 1.0
    if partial != 1.0:
        raise ConfigError(f"{source}: partial_rotary_factor {partial!r} is not supported; only whole heads (1.0).")
    rope_theta, rope_scaling = _rope(raw, fields, source)
    return ModelConfig(
        family=family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers", limit=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.size("max_position_embeddings", 2048 if family == "llama" else 32768),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        attention_bias=family == "qwen2" or fields.flag("attention_bias"),
        mlp_bias=family != "qwen2" and fields.flag("mlp_bias"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=_dtype(raw, source),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys([*token_ids(raw.get("eos_token_id"), source), *eos_token_ids])),
        quantization=_quantization(raw, source),
    )


def needed_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape ([out, in]) of every tensor that a plain checkpoint of this architecture must have.

    Biases: qwen2 has them on q, k and v; llama with `attention_bias` on q, k, v and o.
    """
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden), "o": (hidden, q_width)}
    biased = "qkv" if config.family == "qwen2" else "qkvo" if config.attention_bias else ""
    mlp = {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    needed: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        needed[prefix + "input_layernorm.weight"] = (hidden,)
        for name, shape in attention.items():
            needed[f"{prefix}self_attn.{name}_proj.weight"] = shape
            if name in biased:
                needed[f"{prefix}self_attn.{name}_proj.bias"] = shape[:1]
        needed[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, shape in mlp.items():
            needed[f"{prefix}mlp.{name}_proj.weight"] = shape
            if config.mlp_bias:
                needed[f"{prefix}mlp.{name}_proj.bias"] = shape[:1]
    needed["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        needed["lm_head.weight"] = (config.vocab_size, hidden)
    return needed


def token_ids(value: object, source: str) -> list[int]:
    """An end-of-sequence entry (an id, a list of ids or null) as a list."""
    ids: list[int] = []
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise ConfigError(f"{source}: eos_token_id is {value!r}, not a token id or a list of them.")
        ids.append(item)
    return ids


def _family(raw: Mapping[str, object], source: str) -> str:
    known = ", ".join(ARCHITECTURES)
    architectures = raw.get("architectures")
    if isinstance(architectures, list) and architectures:
        for name in architectures:
            if name in ARCHITECTURES:
                return ARCHITECTURES[name]
        raise ConfigError(f"{source}: the architecture {architectures[0]} is not supported; known are {known}.")
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in KNOWN_FAMILIES:
        return model_type
    named = f"the model_type {model_type!r} is not supported" if model_type else "it names no architecture"
    raise ConfigError(f"{source}: {named}; known architectures are {known} (families {', '.join(KNOWN_FAMILIES)}).")


def _rope(raw: Mapping[str, object], fields: _Fields, source: str) -> tuple[float, dict[str, object] | None]:
    """Base and scaling, from `rope_theta` and `rope_scaling` or from the newer `rope_parameters` alone."""
    scaling: dict[str, object] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.get(key)
        if part is None:
            continue
        if not isinstance(part, dict):
            raise ConfigError(f"{source}: {key} is {part!r}, not an object.")
        scaling.update(part)
    theta = _Fields(scaling, source).number("rope_theta", fields.number("rope_theta", 10000.0))
    for name in ("rope_theta", "partial_rotary_factor"):
        scaling.pop(name, None)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{source}: rotary scaling of type {kind!r} is not supported; known are {', '.join(ROPE_TYPES)}."
        )
    if kind == "default":
        return theta, None
    scaling.pop("type", None)
    scaling["rope_type"] = kind
    wanted = ["factor"]
    if kind == "llama3":
        wanted += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    inner = _Fields(scaling, f"{source}: rope_scaling")
    for name in wanted:
        scaling[name] = inner.number(name)
    return theta, scaling


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


class _Fields:
    """Typed reading of a JSON object; every complaint names the source and the field."""

    def __init__(self, raw: Mapping[str, object], source: str) -> None:
        self.raw = raw
        self.source = source

    def size(self, name: str, default: int | None = None, limit: int = 1 << 40) -> int:
        """A whole number above 0 and up to `limit`; an absent one takes the default."""
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.source}: {name} is missing.")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
            raise ConfigError(f"{self.source}: {name} is {value!r}, not a whole number from 1 to {limit:,}.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.source}: {name} is missing.")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{self.source}: {name} is {value!r}, not a number above 0.")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {name} is {value!r}, not true or false.")
        return bool(value)

    def token_id(self, name: str) -> int | None:
        value = self.raw.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None
