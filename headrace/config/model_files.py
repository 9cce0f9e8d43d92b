"""What a model's files say of themselves: architecture, tensors and their places, template. Reads no weights.

A Hugging Face directory and a GGUF file end in the same value. Tensor names are Hugging Face's in both; every
tensor the architecture needs is checked to be there with the right shape, so that loading cannot fail half-way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from headrace.config import gguf_model
from headrace.config.architecture import model_config, token_ids
from headrace.config.encoder import WORDS, encoder_tensors
from headrace.config.errors import ConfigError
from headrace.config.gguf_format import GGUFHeader, read_gguf
from headrace.config.gguf_names import hugging_face_tensors
from headrace.config.model import ModelConfig
from headrace.config.model_tensors import needed_tensors
from headrace.config.other_architecture import OTHER_FAMILY
from headrace.config.pooling import PoolingFiles, read_pooling_files
from headrace.config.safetensors_format import read_safetensors

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PLAIN_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `num_bytes` bytes at `offset` of `file`. `shape` is row-major ([out, in]);
    `dtype` is F32, F16, BF16, a GGUF block type (Q4_0, Q6_K, ...) or another name of a quantised checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk, described. `generation_config` and `tokenizer_config` are {} where there is no such file.

    `chat_template` is the default one of `chat_templates`; None when the model has none. `tokenizer_json` is
    None for a GGUF file, whose header holds the vocabulary, and for a directory without that file.
    """

    path: Path
    kind: Literal["hf", "gguf"]
    config: ModelConfig
    tensors: dict[str, TensorInfo] = field(repr=False)
    generation_config: dict[str, object]
    tokenizer_config: dict[str, object] = field(repr=False)
    chat_templates: dict[str, str] = field(repr=False)
    tokenizer_json: Path | None
    gguf: GGUFHeader | None = field(repr=False)
    pooling: PoolingFiles = field(default_factory=PoolingFiles)
    """What is said of making vectors with the model."""

    @property
    def chat_template(self) -> str | None:
        default = self.chat_templates.get("default")
        return default if default is not None else next(iter(self.chat_templates.values()), None)

    @property
    def total_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensors.values())


def open_model(path: Path, hf_overrides: Mapping[str, object] | None = None) -> ModelFiles:
    """Describe a Hugging Face directory or a GGUF file.

    `hf_overrides` are merged into the config dictionary, nested objects key by key. Raises ConfigError for
    missing or damaged files, unknown architectures and tensor types, and missing or misshapen tensors.
    """
    path = Path(path)
    overrides = hf_overrides or {}
    if path.is_dir():
        gguf_files = sorted(path.glob("*.gguf"))
        if not (path / "config.json").exists() and len(gguf_files) == 1:
            return _open_gguf(gguf_files[0], overrides)
        return _open_directory(path, overrides)
    if not path.exists():
        raise ConfigError(f"{path} does not exist.")
    if path.suffix == ".safetensors":
        raise ConfigError(f"{path} holds weights only: name its directory, {path.parent}, which has the config.json.")
    return _open_gguf(path, overrides)


def read_json_object(path: Path) -> dict[str, object]:
    """A JSON file that must hold an object. Raises ConfigError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def _open_gguf(path: Path, overrides: Mapping[str, object]) -> ModelFiles:
    header = read_gguf(path)
    config = model_config(_merged(gguf_model.config_dictionary(path, header), overrides), str(path))
    tensors: dict[str, TensorInfo] = {}
    architecture = str(header.metadata["general.architecture"])
    for stored in header.tensors.values():
        for name, tensor in hugging_face_tensors(architecture, stored):
            tensors[name] = TensorInfo(name, tensor.shape, tensor.type, path, tensor.offset, tensor.num_bytes)
    _check_tensors(path, config, tensors, gguf_model.SUPPORTED_TYPES)
    return ModelFiles(
        path=path,
        kind="gguf",
        config=config,
        tensors=tensors,
        generation_config={},
        tokenizer_config={},
        chat_templates=gguf_model.chat_templates(header),
        tokenizer_json=None,
        gguf=header,
    )


def _open_directory(path: Path, overrides: Mapping[str, object]) -> ModelFiles:
    config_path = path / "config.json"
    if not config_path.exists():
        raise ConfigError(_no_config_message(path))
    generation_config = _optional_json(path / "generation_config.json")
    tokenizer_config = _optional_json(path / "tokenizer_config.json")
    tensors = encoder_tensors(_bare_tensors(_text_tensors(_safetensors(path))))
    raw = _merged(read_json_object(config_path), overrides)
    if not raw.get("dtype") and not raw.get("torch_dtype"):
        raw["dtype"] = _stored_dtype(tensors)
    eos = token_ids(generation_config.get("eos_token_id"), str(path / "generation_config.json"))
    config = model_config(raw, str(config_path), eos)
    if config.quantization is None and config.family != OTHER_FAMILY:
        _check_tensors(path, config, tensors, PLAIN_DTYPES)
    tokenizer_json = path / "tokenizer.json"
    return ModelFiles(
        path=path,
        kind="hf",
        config=config,
        tensors=tensors,
        generation_config=generation_config,
        tokenizer_config=tokenizer_config,
        chat_templates=_chat_templates(path, tokenizer_config),
        tokenizer_json=tokenizer_json if tokenizer_json.exists() else None,
        gguf=None,
        pooling=read_pooling_files(path, raw),
    )


def _no_config_message(path: Path) -> str:
    gguf_files = sorted(p.name for p in path.glob("*.gguf"))
    if len(gguf_files) > 1:
        return f"{path} has no config.json but {len(gguf_files)} GGUF files; name one of them: {', '.join(gguf_files)}."
    inside = sorted(p.parent.name for p in path.glob("*/config.json"))
    if inside:
        return f"{path} has no config.json; models lie in its folders: {', '.join(inside[:8])}."
    found = sorted(p.name for p in path.iterdir())[:8]
    holds = f"it holds {', '.join(found)}" if found else "it is empty"
    return f"{path} is not a model: config.json (or one .gguf file) was looked for, and {holds}."


def _safetensors(path: Path) -> dict[str, TensorInfo]:
    """All tensors of model.safetensors, or of the files its index names."""
    index_path = path / INDEX_FILE
    if index_path.exists():
        weight_map = read_json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ConfigError(f"{index_path} has no weight_map from tensor names to files.")
        names = sorted(set(weight_map.values()))
        outside = [n for n in names if Path(n).name != n]
        if outside:
            raise ConfigError(f"{index_path} names {outside[0]!r}, which is not a file beside it.")
        missing = [n for n in names if not (path / n).exists()]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(names)} weight files named by {index_path} are missing: "
                f"{', '.join(missing[:4])}. Download them again."
            )
    elif (path / WEIGHTS_FILE).exists():
        names = [WEIGHTS_FILE]
    else:
        parts = sorted(p.name for p in path.glob("*.safetensors"))
        pickles = sorted(p.name for p in [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
        if parts:
            hint = f"there is {', '.join(parts[:4])}; {INDEX_FILE} must say which tensors lie where"
        elif pickles:
            hint = f"{pickles[0]} is a pickle, which can run code and is not read: convert it to safetensors"
        else:
            hint = "there are no weights"
        raise ConfigError(f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: {hint}.")
    tensors: dict[str, TensorInfo] = {}
    for name in names:
        for tensor in read_safetensors(path / name).values():
            tensors[tensor.name] = TensorInfo(
                tensor.name, tensor.shape, tensor.dtype, path / name, tensor.offset, tensor.num_bytes
            )
    return tensors


def _text_tensors(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Of a model of text and images the text part, under the names that it has alone; other models as they are."""
    renamed: dict[str, TensorInfo] = {}
    for prefix, own in (("language_model.", ""), ("model.language_model.", "model.")):
        found = {own + name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}
        renamed |= {name: replace(info, name=name) for name, info in found.items()}
    if not renamed:
        return tensors
    return {**{name: info for name, info in tensors.items() if name == "lm_head.weight"}, **renamed}


def _bare_tensors(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Of a decoder saved without its output matrix, under the names that it has with one; others as they are."""
    if "embed_tokens.weight" not in tensors:
        return tensors
    return {f"model.{name}": replace(info, name=f"model.{name}") for name, info in tensors.items()}


def _check_tensors(path: Path, config: ModelConfig, tensors: Mapping[str, TensorInfo], dtypes: tuple[str, ...]) -> None:
    needed = needed_tensors(config)
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} of the {len(needed)} tensors that a {config.family} model of "
            f"{config.num_layers} layers needs: {', '.join(missing[:4])}{', ...' if len(missing) > 4 else '.'}"
        )
    wrong = [
        f"{name} has {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in needed.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise ConfigError(
            f"{path}: {len(wrong)} tensors do not have the shape the configuration asks for: {'; '.join(wrong[:4])}."
        )
    for name in needed:
        if tensors[name].dtype not in dtypes:
            raise ConfigError(
                f"{path}: the tensor {name} has the dtype {tensors[name].dtype}, which is not supported; "
                f"known are {', '.join(dtypes)}."
            )


def _stored_dtype(tensors: Mapping[str, TensorInfo]) -> str | None:
    embedding = tensors.get("model.embed_tokens.weight") or tensors.get(WORDS)
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return names.get(embedding.dtype) if embedding else None


def _chat_templates(path: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Templates by name. A file beside the model wins over tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    stored = tokenizer_config.get("chat_template")
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, list):
        for entry in stored:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    beside = path / "chat_template.jinja"
    if beside.exists():
        try:
            templates["default"] = beside.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{beside} cannot be read: {error}.") from error
    return templates


def _optional_json(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.exists() else {}


def _merged(base: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    result = dict(base)
    for key, value in overrides.items():
        current = result.get(key)
        result[key] = _merged(current, value) if isinstance(current, dict) and isinstance(value, dict) else value
    return result
