"""How a model's rows become one vector, and whether it is served for that: what its files say, and what flags change.

sentence-transformers keeps it in files beside config.json: modules.json lists the parts, 1_Pooling/config.json says how
rows are pooled, a Normalize part scales vectors to length 1, sentence_bert_config.json has the longest text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from headrace.config.errors import ConfigError

Pooling = Literal["cls", "last", "mean"]


class Pooler(msgspec.Struct, frozen=True, kw_only=True):
    """What a pooling model does with its rows. `embed` takes the first, the last or the mean of a text's rows;
    `score` puts the first through the model's classification head, which has one output."""

    task: Literal["embed", "score"] = "embed"
    pooling: Pooling
    normalize: bool = True
    """Vectors are scaled to length 1."""
    activation: Literal["sigmoid", "identity"] = "sigmoid"
    """Of a score."""
    dimensions: tuple[int, ...] | None = ()
    """The lengths besides its own that vectors may be cut to: only models trained for it stay useful. None: any."""

    def describe(self) -> str:
        if self.task == "score":
            return f"scores of pairs of texts, {self.activation}"
        rows = {"cls": "the first token's row", "last": "the last token's row", "mean": "the mean of all rows"}
        return f"vectors: {rows[self.pooling]}, {'length 1' if self.normalize else 'not normalised'}"


class PoolingFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files say of pooling; None where they say nothing."""

    pooling: Pooling | None = None
    normalize: bool = True
    max_length: int | None = None
    default_prompt: str | None = None
    """What sentence-transformers puts before every text unless told otherwise; here it is the client's to send."""
    activation: Literal["sigmoid", "identity"] = "sigmoid"
    dimensions: tuple[int, ...] | None = ()
    problem: str | None = None
    """Why it cannot be done as they say."""


_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_PARTS = ("Transformer", "Pooling", "Normalize")


def read_pooling_files(path: Path, raw: Mapping[str, object]) -> PoolingFiles:
    """`raw` is the dictionary of config.json in the directory `path`. Raises ConfigError for files that are damaged."""
    found = PoolingFiles(activation=_activation(raw), dimensions=_dimensions(raw))
    modules, limits, prompts = (
        path / name for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
    )
    if not modules.exists():
        return found
    parts = _parts(modules)
    length = _object(limits).get("max_seq_length") if limits.exists() else None
    found = msgspec.structs.replace(
        found,
        normalize="Normalize" in parts,
        max_length=length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else None,
        default_prompt=_default_prompt(_object(prompts)) if prompts.exists() else None,
    )
    unknown = [kind for kind in parts if kind not in _PARTS]
    if unknown:
        problem = f"{modules} has a part of the kind {unknown[0]!r}; known are {', '.join(_PARTS)}."
        return msgspec.structs.replace(found, problem=problem)
    if "Pooling" not in parts:
        return found
    source = path / parts["Pooling"] / "config.json"
    modes = _modes(_object(source))
    if len(modes) != 1 or modes[0] not in _MODES:
        problem = f"{source} pools by {' and '.join(modes) or 'nothing'}; known is one of {', '.join(_MODES)}."
        return msgspec.structs.replace(found, problem=problem)
    return msgspec.structs.replace(found, pooling=_MODES[modes[0]])


def _parts(modules: Path) -> dict[str, str]:
    """The folder of each part, by the last name of its type."""
    listed = _json(modules)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise ConfigError(f"{modules} does not hold a list of objects.")
    return {str(m.get("type", "")).rpartition(".")[2]: str(m.get("path", "")) for m in listed}


def _default_prompt(config: Mapping[str, object]) -> str | None:
    named, prompts = config.get("default_prompt_name"), config.get("prompts")
    prompt = prompts.get(named) if isinstance(named, str) and isinstance(prompts, dict) else None
    return prompt if isinstance(prompt, str) and prompt else None


def _modes(pooling: Mapping[str, object]) -> list[str]:
    """What is switched on: one flag for each mode, or, in newer files, the mode's name."""
    named = pooling.get("pooling_mode")
    if isinstance(named, str):
        return [f"pooling_mode_{named}{'' if named.endswith('token') else '_tokens' if named == 'mean' else '_token'}"]
    return [name for name, value in pooling.items() if name.startswith("pooling_mode") and value is True]


def _dimensions(raw: Mapping[str, object]) -> tuple[int, ...] | None:
    listed = raw.get("matryoshka_dimensions")
    if isinstance(listed, list):
        return tuple(size for size in listed if isinstance(size, int) and size > 0)
    return None if raw.get("is_matryoshka") is True else ()


def _activation(raw: Mapping[str, object]) -> Literal["sigmoid", "identity"]:
    """Of a cross-encoder, as sentence-transformers writes it."""
    own = raw.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else raw.get("sbert_ce_default_activation_function")
    return "identity" if isinstance(named, str) and named.endswith("Identity") else "sigmoid"


def _object(path: Path) -> dict[str, object]:
    value = _json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
