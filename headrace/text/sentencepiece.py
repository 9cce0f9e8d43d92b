"""SentencePiece vocabularies as a `tokenizers` backend: from a tokenizer.model, or from what a GGUF file keeps of one.

A tokenizer.model is a protocol buffer of pieces with a score and a kind each, and of a few settings; it is read here,
field by field, because that is all that is wanted of it. Two models exist. BPE: a pair is merged in the order of the
score of what it becomes, so the merges are every way to put a piece together, best score first. Unigram: of all
ways to cut a text the one with the highest sum of scores.

Known differences: a unigram vocabulary with bytes takes a text that spells a byte's piece ("<0x41>") for it; and where
pieces of spaces only were defined by hand, a run of spaces may be cut elsewhere, unless the model is BPE and puts no
space before a text, as Gemma's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.config.errors import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_KINDS = range(1, 7)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
MAX_FILE_BYTES = 256 << 20

Prefix = Literal["always", "first", "never"]
"""Which part of a text gets a space before it: each between special tokens, the one it begins with (if that does not
begin with a space, as transformers has it), or none."""


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """A vocabulary; the id of a piece is its place in the list."""

    model: Literal["bpe", "unigram"]
    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    unk_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    charsmap: bytes = b""
    """The normalisation of characters in SentencePiece's compiled form; empty for none."""
    space_prefix: bool = True
    one_space: bool = False
    """Runs of spaces count as one, and those around a text not at all."""


def read_sentencepiece(path: Path) -> SentencePieces:
    """Read a tokenizer.model. Raises ConfigError for a file that is none, is damaged or has another kind of model."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size:,} bytes, more than any SentencePiece model.")
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        found = _parse(raw)
    except (ValueError, struct.error, IndexError) as error:
        raise ConfigError(
            f"{path} is not a SentencePiece model that can be read ({error}). "
            "With a tokenizer.json beside it that one is read instead."
        ) from error
    if not found.pieces:
        raise ConfigError(f"{path} is not a SentencePiece model: it has no pieces.")
    if len(set(found.pieces)) != len(found.pieces):
        raise ConfigError(f"{path}: {len(found.pieces) - len(set(found.pieces))} of its pieces appear twice.")
    return found


def build_backend(source: SentencePieces, prefix: Prefix | None = None) -> Any:
    """A `tokenizers.Tokenizer`; control pieces and the unknown one are its special tokens.

    `prefix` None is "always" or "never", as the vocabulary has it. What `tokenizers` cannot build it raises.
    """
    pieces, kinds = source.pieces, source.kinds
    bytes_ = "<0x00>" in pieces
    unknown = source.unk_id
    if unknown is None:
        unknown = next((token_id for token_id, kind in enumerate(kinds) if kind == UNKNOWN), None)
    if source.model == "unigram":
        vocab = list(zip(pieces, source.scores, strict=True))
        backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=unknown, byte_fallback=bytes_))
    else:
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab={piece: token_id for token_id, piece in enumerate(pieces)},
                merges=_merges(source),
                unk_token=None if unknown is None else pieces[unknown],
                fuse_unk=True,
                byte_fallback=bytes_,
            )
        )
    prefix = prefix or ("always" if source.space_prefix else "never")
    spaces: list[Any] = [normalizers.Precompiled(source.charsmap)] if source.charsmap else []
    if source.one_space:
        spaces += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex("^ | $"), "")]
    if prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        spaces += [normalizers.Prepend("▁")] if prefix == "always" else []
        spaces += [normalizers.Replace(" ", "▁")]
    if spaces:
        backend.normalizer = normalizers.Sequence(spaces)
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(chain if prefix == "never" else [*chain, decoders.Strip(" ", 1, 0)])
    named = list(zip(pieces, kinds, strict=True))
    special = [AddedToken(t, special=True, normalized=False) for t, k in named if k in (CONTROL, UNKNOWN)]
    backend.add_special_tokens(special)
    own = [token for token, kind in named if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in own if "▁" not in token])
    if source.model == "bpe" and prefix == "never":
        # Runs of spaces (Gemma has them) are found once a text's spaces have become marks. Not so with a prefix,
        # which would be put before these tokens too; there they are merged as other pieces are.
        backend.add_tokens([AddedToken(token, normalized=True) for token in own if "▁" in token])
    return backend


def _merges(source: SentencePieces) -> list[tuple[str, str]]:
    known = set(source.pieces)
    ranked: list[tuple[float, str, str]] = []
    for piece, score, kind in zip(source.pieces, source.scores, source.kinds, strict=True):
        if kind == USER_DEFINED and "▁" in piece:
            score = float(len(piece))  # before all others, whose scores are not above 0, and the longest first
        if kind == NORMAL or (kind == USER_DEFINED and "▁" in piece):
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in known and right in known:
                    ranked.append((score, left, right))
    # A stable sort: ways to the same piece keep their order, shortest left part first.
    ranked.sort(key=lambda entry: -entry[0])
    return [(left, right) for _, left, right in ranked]


def _parse(raw: bytes) -> SentencePieces:
    """Field 1 are the pieces (1 text, 2 score, 3 kind), 2 the settings of training, 3 those of normalisation."""
    pieces: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trained: dict[int, Any] = {}
    normalized: dict[int, Any] = {}
    for number, value in _fields(raw):
        if number == 1:
            piece = dict(_fields(_bytes_of(value)))
            pieces.append(_bytes_of(piece.get(1, b"")).decode("utf-8"))
            scores.append(struct.unpack("<f", _bytes_of(piece.get(2, bytes(4))))[0])
            kind = piece.get(3, NORMAL)
            if not isinstance(kind, int) or kind not in _KINDS:
                raise ValueError(f"piece {len(pieces) - 1} has the kind {kind!r}")
            kinds.append(kind)
        elif number == 2:
            trained.update(_fields(_bytes_of(value)))
        elif number == 3:
            normalized.update(_fields(_bytes_of(value)))
    kind_of_model = trained.get(3, _UNIGRAM)
    if kind_of_model not in (_UNIGRAM, _BPE):
        raise ValueError(f"its model has the type {kind_of_model!r}; known are 1 (unigram) and 2 (BPE)")
    defaults = {40: 0, 41: 1, 42: 2, 43: -1}
    unk_id, bos_id, eos_id, pad_id = (
        _signed(trained.get(number, default), len(pieces)) for number, default in defaults.items()
    )
    return SentencePieces(
        model="bpe" if kind_of_model == _BPE else "unigram",
        pieces=pieces,
        scores=scores,
        kinds=kinds,
        unk_id=unk_id,
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
        charsmap=_bytes_of(normalized.get(2, b"")),
        space_prefix=bool(normalized.get(3, 1)),
        one_space=bool(normalized.get(4, 1)),
    )


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message: an int, or the bytes of everything that is none."""
    position = 0
    while position < len(raw):
        tag, position = _varint(raw, position)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, position = _varint(raw, position)
            yield number, value
            continue
        if wire == _BYTES:
            length, position = _varint(raw, position)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"byte {position} has the wire type {wire}")
        if number == 0 or length > len(raw) - position:
            raise ValueError(f"a field at byte {position} runs past the end")
        yield number, raw[position : position + length]
        position += length


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
        if shift > 63:
            raise ValueError(f"a number before byte {position} does not end")


def _bytes_of(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes were expected")
    return value


def _signed(value: object, count: int) -> int | None:
    """A token id, None for one that is off (-1, stored as a number of 64 bits) or beyond the vocabulary."""
    return value if isinstance(value, int) and 0 <= value < count else None
