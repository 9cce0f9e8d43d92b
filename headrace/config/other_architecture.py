"""Models of families that Headrace has no file for: what it must know of them to schedule and to size the KV cache.

Their layers are transformers' own code (runtime/other_model.py). Here only sizes are read, under the names that
config.json files have for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.config.errors import ConfigError
from headrace.config.json_fields import JsonFields
from headrace.config.model import ModelConfig

OTHER_FAMILY = "other"

_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
}
"""What transformers calls a size, and what older files call it."""


def other_config(
    raw: Mapping[str, object], source: str, *, dtype: str, eos_token_ids: Iterable[int], quantization: str | None
) -> ModelConfig:
    """Raises ConfigError for a size that is missing, and for weights that are quantised."""
    architecture = _architecture(raw)
    if quantization is not None:
        raise ConfigError(
            f"{source}: {architecture} is not one of Headrace's own families, and others are served from plain weights "
            f"only; these are quantised with {quantization!r}."
        )
    known = {name: next((raw[n] for n in (name, *old) if raw.get(n) is not None), None) for name, old in _NAMES.items()}
    fields = JsonFields({**raw, **{name: value for name, value in known.items() if value is not None}}, source)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    return ModelConfig(
        family=OTHER_FAMILY,
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size", 4 * hidden_size),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=fields.size("head_dim", hidden_size // num_heads),
        max_position_embeddings=fields.size("max_position_embeddings"),
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=dtype,
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
    )


def is_other(raw: Mapping[str, object]) -> bool:
    """A decoder for text, as far as its name tells."""
    return _architecture(raw).endswith(("ForCausalLM", "LMHeadModel"))


def _architecture(raw: Mapping[str, object]) -> str:
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""
