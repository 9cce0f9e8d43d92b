"""Builds a tokenizer from the vocabulary that a GGUF file carries in its metadata.

Two kinds. "gpt2": byte-level BPE with its merges, and a name for how text is split into words first. "llama":
SentencePiece BPE, which stores a score for each piece instead of merges; a pair is merged in the order of the
score of what it becomes, so the merges are every way to put a piece together, best score first.

Only word splits are known whose definition in the model's own tokenizer.json is known; another name is refused,
because a wrong split gives tokens that the model never saw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.config.errors import ConfigError
from headrace.config.gguf_format import GGUFHeader

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

# The value of tokenizer.ggml.pre: the word split that the vocabulary was trained with.
_WORD_SPLITS = {
    "gpt-2": "gpt2",
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_ADVICE = "Name a directory with the model's tokenizer.json: --tokenizer DIRECTORY."


def backend_from_gguf(path: Path, header: GGUFHeader) -> tuple[Any, bool]:
    """The `tokenizers.Tokenizer` of a GGUF file, and whether a text gets a beginning-of-sequence token.

    Raises ConfigError for a kind or word split that is not known and for a vocabulary that does not fit together.
    """
    metadata = header.metadata
    model = metadata.get("tokenizer.ggml.model")
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if model not in ("gpt2", "llama"):
        raise ConfigError(f"{path}: the GGUF tokenizer {model!r} is not supported; known are gpt2, llama. {_ADVICE}")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(f"{path} has no tokenizer.ggml.tokens. {_ADVICE}")
    kinds: list[int] = types if isinstance(types, list) and len(types) == len(tokens) else [_NORMAL] * len(tokens)
    vocab: dict[str, int] = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConfigError(f"{path}: {len(tokens) - len(vocab)} tokens of its vocabulary appear twice. {_ADVICE}")
    build = _byte_level if model == "gpt2" else _sentencepiece
    try:
        backend, adds_bos = build(path, metadata, vocab, kinds)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{path}: the vocabulary and merges do not fit together: {error}. {_ADVICE}") from error
    special = (_CONTROL, _UNKNOWN) if model == "llama" else (_CONTROL,)
    named = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in named if k in special])
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in named if k == _USER_DEFINED])
    return backend, bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))


def _byte_level(path: Path, metadata: dict[str, object], vocab: dict[str, int], kinds: list[int]) -> tuple[Any, bool]:
    name, merges = metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.ggml.merges")
    if name not in _WORD_SPLITS:
        known = ", ".join(_WORD_SPLITS)
        raise ConfigError(f"{path}: the GGUF pre-tokenizer {name!r} is not supported; known are {known}. {_ADVICE}")
    if not isinstance(merges, list):
        raise ConfigError(f"{path} has no tokenizer.ggml.merges. {_ADVICE}")
    split = _WORD_SPLITS[str(name)]
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=split == "llama3"))
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    return backend, split == "llama3"


def _pre_tokenizer(split: str) -> Any:
    if split == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    words = Regex(_LLAMA3_WORDS if split == "llama3" else _QWEN2_WORDS)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(
    path: Path, metadata: dict[str, object], vocab: dict[str, int], kinds: list[int]
) -> tuple[Any, bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocab):
        raise ConfigError(f"{path} has no score for each token (tokenizer.ggml.scores). {_ADVICE}")
    ranked: list[tuple[float, str, str]] = []
    for piece, token_id in vocab.items():
        if kinds[token_id] == _NORMAL:
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in vocab and right in vocab:
                    ranked.append((scores[token_id], left, right))
    # A stable sort: ways to the same piece keep their order, shortest left part first.
    ranked.sort(key=lambda entry: -entry[0])
    unknown = next((piece for piece, token_id in vocab.items() if kinds[token_id] == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for _, left, right in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback="<0x00>" in vocab,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if prefix else chain)
    return backend, True
