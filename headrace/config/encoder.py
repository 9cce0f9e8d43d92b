"""Text encoders: models that read a whole text at once, in both directions, and give rows instead of a next token.

BERT and RoBERTa share everything but where positions begin and how the parts of a classification head are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.config.errors import ConfigError
from headrace.config.json_fields import JsonFields
from headrace.config.model import ModelConfig

if TYPE_CHECKING:
    from headrace.config.model_files import TensorInfo

_FAMILIES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "roberta", "Camembert": "roberta"}
_TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification")
ENCODERS = {f"{name}{task}": family for name, family in _FAMILIES.items() for task in _TASKS}
"""By architecture. What a masked language model has besides its encoder is not used."""
ENCODER_FAMILIES = ("bert", "roberta")

WORDS = "embeddings.word_embeddings.weight"
HEADS = {"bert": ("pooler.dense", "classifier"), "roberta": ("classifier.dense", "classifier.out_proj")}
"""The two projections of a classification head."""

_DEFAULTS = {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}


def encoder_config(raw: Mapping[str, object], source: str, family: str, dtype: str) -> ModelConfig:
    """Raises ConfigError for what is not implemented and for values that cannot be."""
    for name, known in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if raw.get(name, known) != known:
            raise ConfigError(f"{source}: {name} {raw[name]!r} is not supported; the known one is {known!r}.")
    if raw.get("is_decoder") or raw.get("add_cross_attention"):
        raise ConfigError(f"{source}: a {family} model as a decoder is not supported; it is served as an encoder.")
    fields = JsonFields({**_DEFAULTS, **raw}, source)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden_size % num_heads:
        raise ConfigError(f"{source}: hidden_size {hidden_size} is not a multiple of {num_heads} heads.")
    # RoBERTa counts positions from behind the padding token's id.
    first = (1 if (pad := fields.token_id("pad_token_id")) is None else pad) + 1 if family == "roberta" else 0
    positions = fields.size("max_position_embeddings")
    if first >= positions:
        raise ConfigError(f"{source}: max_position_embeddings {positions} leaves no position behind the first {first}.")
    return ModelConfig(
        family=family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=positions - first,
        rms_norm_eps=fields.number("layer_norm_eps", 1e-12),
        rope_theta=1e4,
        dtype=dtype,
        has_output=False,
        is_encoder=True,
        first_position=first,
        num_token_types=fields.size("type_vocab_size"),
        num_labels=_num_labels(raw, source),
    )


def _num_labels(raw: Mapping[str, object], source: str) -> int:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not str(names[0]).endswith("ForSequenceClassification"):
        return 0
    labels = raw.get("id2label")
    return len(labels) if isinstance(labels, dict) else JsonFields(raw, source).size("num_labels", 2)


def encoder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape ([out, in]) of every tensor that is needed, as a bare encoder names them."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        WORDS: (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings + config.first_position, hidden),
        "embeddings.token_type_embeddings.weight": (config.num_token_types, hidden),
    }

    def norm(name: str) -> None:
        shapes.update({f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)})

    def linear(name: str, out: int, width: int) -> None:
        shapes.update({f"{name}.weight": (out, width), f"{name}.bias": (out,)})

    norm("embeddings.LayerNorm")
    for layer in range(config.num_layers):
        block = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            linear(f"{block}.attention.self.{part}", hidden, hidden)
        linear(f"{block}.attention.output.dense", hidden, hidden)
        norm(f"{block}.attention.output.LayerNorm")
        linear(f"{block}.intermediate.dense", ffn, hidden)
        linear(f"{block}.output.dense", hidden, ffn)
        norm(f"{block}.output.LayerNorm")
    if config.num_labels:
        dense, output = HEADS[config.family]
        linear(dense, hidden, hidden)
        linear(output, config.num_labels, hidden)
    return shapes


def encoder_tensors(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Those of an encoder inside a larger model under the names that it has alone; other models' as they are."""
    prefix = next((p for p in ("", "bert.", "roberta.") if p + WORDS in tensors), None)
    if prefix is None:
        return tensors
    renamed = {}
    for name, info in tensors.items():
        own = name.removeprefix(prefix)
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):  # As TensorFlow called them.
            own = own.removesuffix(old) + new if own.endswith(old) else own
        renamed[own] = replace(info, name=own)
    return renamed
