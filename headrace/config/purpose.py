"""What a model is served for, text or vectors: decided once, from its files and the flags, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.config.errors import ConfigError
from headrace.config.model_files import ModelFiles
from headrace.config.other_architecture import OTHER_FAMILY
from headrace.config.pooling import Pooler, Pooling

_POOLING_TASKS = ("embed", "score")
_UNBUILT = {
    "classify": "classification",
    "reward": "reward models",
    "transcription": "transcription",
    "draft": "draft models",
}
_POOLING_TYPES: dict[str, Pooling] = {"CLS": "cls", "LAST": "last", "MEAN": "mean"}


def find_pooler(
    files: ModelFiles, *, task: str, runner: str, convert: str, changes: Mapping[str, object]
) -> Pooler | None:
    """How the model's rows are pooled; None where it generates text. `changes` is --override-pooler-config.

    Raises ConfigError where the flags contradict each other or the model cannot do what they ask for.
    """
    for flag, value in (("--task", task), ("--runner", runner), ("--convert", convert)):
        if value in _UNBUILT:
            raise ConfigError(f"{flag} {value}: {_UNBUILT[value]}: not built yet; embed and score are.")
    asked = [
        (f"--{name} {value}", pools)
        for name, value, pools in (
            ("task", task, task in _POOLING_TASKS),
            ("runner", runner, runner == "pooling"),
            ("convert", convert, True),
        )
        if value not in ("auto", "none")
    ]
    if len({pools for _, pools in asked}) > 1:
        raise ConfigError(f"{' and '.join(flag for flag, _ in asked)} contradict each other: leave one of them out.")
    only_vectors = files.config.is_encoder or not files.config.has_output
    if asked and not asked[0][1] and only_vectors:
        kind = "an encoder" if files.config.is_encoder else "a decoder without its output matrix"
        raise ConfigError(
            f"{asked[0][0]}: this model is {kind}, which gives vectors and no text. Use --runner pooling."
        )
    if not (asked[0][1] if asked else only_vectors or files.pooling.pooling is not None):
        if changes:
            raise ConfigError("--override-pooler-config: the model is served for text. Use --runner pooling with it.")
        return None
    if files.config.family == OTHER_FAMILY:
        raise ConfigError(f"{files.path}: vectors are made with Headrace's own families only; this is another one.")
    if files.config.num_labels:
        return _scorer(files, task, changes)
    return _embedder(files, changes)


def _scorer(files: ModelFiles, task: str, changes: Mapping[str, object]) -> Pooler:
    count = files.config.num_labels
    if count != 1:
        raise ConfigError(
            f"{files.path}: its head tells {count} classes apart, and classification is not built yet; a cross-encoder "
            "with one output is served for scores."
        )
    if task == "embed":
        raise ConfigError(
            f"--task embed: {files.path} is a cross-encoder, which scores pairs of texts. Use --task score."
        )
    scorer = Pooler(task="score", pooling="cls", activation=files.pooling.activation)
    for name, value in changes.items():
        if name not in ("activation", "use_activation") or not isinstance(value, bool):
            raise _unknown(name, value, "of a cross-encoder use_activation (true or false)")
        scorer = msgspec.structs.replace(scorer, activation="sigmoid" if value else "identity")
    return scorer


def _embedder(files: ModelFiles, changes: Mapping[str, object]) -> Pooler:
    own = files.pooling
    pooling: Pooling | None = own.pooling
    normalize, dimensions = own.normalize, own.dimensions
    for name, value in changes.items():
        if name in ("pooling_type", "seq_pooling_type") and str(value).upper() in _POOLING_TYPES:
            pooling = _POOLING_TYPES[str(value).upper()]
        elif name in ("normalize", "use_activation") and isinstance(value, bool):
            normalize = value
        elif value is not None:
            raise _unknown(name, value, f"pooling_type ({', '.join(_POOLING_TYPES)}) and normalize (true or false)")
    if own.problem is not None and ("pooling_type" not in changes or "part of the kind" in own.problem):
        raise ConfigError(f"Vectors cannot be made as the model's files say: {own.problem}")
    if pooling is None:
        pooling = "cls" if files.config.is_encoder else "last"
    if pooling == "cls" and not files.config.is_encoder:
        raise ConfigError("pooling_type CLS: the first token of a decoder sees nothing of the text. Use LAST or MEAN.")
    return Pooler(pooling=pooling, normalize=normalize, dimensions=dimensions)


def _unknown(name: str, value: object, known: str) -> ConfigError:
    return ConfigError(f"--override-pooler-config: {name} {value!r} is not supported; known are {known}.")
