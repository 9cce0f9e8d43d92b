"""Builds a tokenizer from the vocabulary that a GGUF file carries in its metadata.

Three kinds. "gpt2": byte-level BPE with its merges, and a name for how text is split into words first. "llama" and
"t5": SentencePiece's BPE and unigram, with a score for each piece (sentencepiece.py).

Only word splits are known whose definition in the model's own tokenizer.json is known; another name is refused,
because a wrong split gives tokens that the model never saw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.config.errors import ConfigError
from headrace.config.gguf_format import GGUFHeader, Strings
from headrace.text.sentencepiece import CONTROL, NORMAL, USER_DEFINED, SentencePieces, build_backend

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words that begin at a capital: "HelloWorld" is two.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    "llama3": _LLAMA3_WORDS,
    "dbrx": _LLAMA3_WORDS,
    "qwen2": _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}"),
    "gpt-4o": _CASED_WORDS,
    "tekken": _CASED_WORDS.replace(_CONTRACTION, "").replace(r"\p{N}{1,3}", r"\p{N}"),
}

# The value of tokenizer.ggml.pre: the word split that the vocabulary was trained with.
_WORD_SPLITS = {
    "gpt-2": "gpt2",
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "dbrx": "dbrx",
    "gpt-4o": "gpt-4o",
    "llama4": "gpt-4o",
    "tekken": "tekken",
}
_ADVICE = "Name a directory with the model's tokenizer.json: --tokenizer DIRECTORY."


def backend_from_gguf(path: Path, header: GGUFHeader) -> tuple[Any, bool]:
    """The `tokenizers.Tokenizer` of a GGUF file, and whether a text gets a beginning-of-sequence token.

    Raises ConfigError for a kind or word split that is not known and for a vocabulary that does not fit together.
    """
    metadata = header.metadata
    model = metadata.get("tokenizer.ggml.model")
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if model not in ("gpt2", "llama", "t5"):
        raise ConfigError(
            f"{path}: the GGUF tokenizer {model!r} is not supported; known are gpt2, llama and t5. {_ADVICE}"
        )
    if not isinstance(tokens, list | Strings) or not tokens:
        raise ConfigError(f"{path} has no tokenizer.ggml.tokens. {_ADVICE}")
    kinds: list[int] = types if isinstance(types, list) and len(types) == len(tokens) else [NORMAL] * len(tokens)
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
    return backend, bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))


def _byte_level(path: Path, metadata: dict[str, object], vocab: dict[str, int], kinds: list[int]) -> tuple[Any, bool]:
    name, merges = metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.ggml.merges")
    if name not in _WORD_SPLITS:
        known = ", ".join(_WORD_SPLITS)
        raise ConfigError(f"{path}: the GGUF pre-tokenizer {name!r} is not supported; known are {known}. {_ADVICE}")
    if not isinstance(merges, list | Strings):
        raise ConfigError(f"{path} has no tokenizer.ggml.merges. {_ADVICE}")
    split = _WORD_SPLITS[str(name)]
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=split in ("llama3", "tekken")))
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    named = [(token, kinds[token_id]) for token, token_id in vocab.items()]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in named if k == CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in named if k == USER_DEFINED])
    return backend, split in ("llama3", "tekken")


def _pre_tokenizer(split: str) -> Any:
    if split == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    words = Regex(_WORDS[split])
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
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    unigram = metadata.get("tokenizer.ggml.model") == "t5"
    source = SentencePieces(
        model="unigram" if unigram else "bpe",
        pieces=list(vocab),
        scores=[float(score) for score in scores],
        kinds=kinds,
        charsmap=bytes(value & 0xFF for value in charsmap) if isinstance(charsmap, list) else b"",
        space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        one_space=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", unigram)),
    )
    return build_backend(source), not unigram
