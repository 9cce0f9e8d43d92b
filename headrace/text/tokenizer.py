"""Text to token ids and back, from a tokenizer.json, a tokenizer.model or the vocabulary inside a GGUF file.

Encoding is the `tokenizers` library's. Decoding is ours, because a stream needs it exactly: every token is a
fixed string of bytes (`token_bytes`), and text is those bytes joined and decoded as UTF-8. Three spellings of
bytes exist: byte-level ("Ġthe" is b" the"), SentencePiece's ("▁the" is b" the", "<0x0A>" is b"\\n") and WordPiece's
("the" is b" the", "##re" is b"re"), of which text comes back roughly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken

from headrace.config.errors import ConfigError
from headrace.config.gguf_format import GGUFHeader, read_gguf
from headrace.config.gguf_model import end_token_ids
from headrace.config.model_files import ModelFiles, read_json_object
from headrace.text.gguf_vocabulary import backend_from_gguf
from headrace.text.sentencepiece import build_backend, read_sentencepiece

LONG_TEXT_CHARS = 20_000
"""Longer texts take so long that they belong into a thread, and let the others run; shorter ones are done sooner than
handed over."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE spells printable bytes as themselves and the other 68 as characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _bytes_of_characters()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class _Source:
    """A tokenizer as its files give it."""

    backend: Any
    special_tokens: dict[str, str]
    adds_bos: bool | None
    """None = whatever the backend's own post-processor does."""
    eos_token_ids: tuple[int, ...]


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads."""

    def __init__(self, source: _Source, name: str, model_rows: int) -> None:
        backend = source.backend
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling, self._strips_first_space = _spelling(backend, name)
        added = backend.get_added_tokens_decoder()
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_token_ids: dict[str, int] = {self._added[token_id]: token_id for token_id in sorted(self._special)}
        """Of the tokens that are left out of text: by what they are written as."""
        self._bytes: dict[int, bytes] = {}
        self.special_tokens: dict[str, str] = source.special_tokens
        """The special tokens by role (bos_token, eos_token, unk_token, pad_token), as a chat template wants them."""
        self.bos_token: str | None = source.special_tokens.get("bos_token")
        self.eos_token: str | None = source.special_tokens.get("eos_token")
        self.bos_token_id: int | None = self._id_of(self.bos_token)
        self.eos_token_id: int | None = self._id_of(self.eos_token)
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *source.eos_token_ids)))
        """Every id that ends an answer: the tokenizer's and the model's."""
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(self._added, default=-1) + 1)
        base_size = backend.get_vocab_size(with_added_tokens=False)
        if base_size > model_rows:
            raise ConfigError(
                f"{name}: the tokenizer has {base_size:,} tokens, the model only {model_rows:,}: they do not belong "
                "together. Name the model's own tokenizer, or leave --tokenizer out."
            )
        self.usable_vocab_size: int = min(self.vocab_size, model_rows)
        """Ids below it have a row in the model; an added token may lie beyond."""
        self._model_rows = model_rows if self.vocab_size > model_rows else None
        start = backend.encode("", add_special_tokens=True).ids
        self._backend_adds_bos = self.bos_token_id is not None and start[:1] == [self.bos_token_id]
        wanted = self._backend_adds_bos if source.adds_bos is None else source.adds_bos
        self.adds_bos: bool = wanted and self.bos_token_id is not None

    @classmethod
    def load(cls, files: ModelFiles, override: Path | None = None) -> Tokenizer:
        """The model's tokenizer, or the one at `override`: a directory, a tokenizer.json or .model, or a GGUF file.

        Raises ConfigError naming the file looked for, or a kind of tokenizer that is not known.
        """
        model_eos, rows = files.config.eos_token_ids, files.config.vocab_size
        if override is None and files.gguf is not None:
            return cls(_from_gguf(files.path, files.gguf, model_eos), str(files.path), rows)
        path = files.path if override is None else Path(override)
        if path.suffix == ".gguf":
            return cls(_from_gguf(path, read_gguf(path), model_eos), str(path), rows)
        return cls(_from_json(path, model_eos), str(path), rows)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids. Special tokens written out in the text ("<|im_end|>") become those tokens.

        `add_special_tokens` adds what the tokenizer adds by itself, mostly the beginning-of-sequence token.
        Raises ValueError for text that is not valid Unicode (a lone surrogate).
        """
        return self._ids(self._encoding(text, add_special_tokens), add_special_tokens)

    def encode_within(self, text: str, limit: int, side: Literal["left", "right"]) -> list[int]:
        """At most `limit` ids with those that the tokenizer adds: the text loses tokens at this side, they stay.

        Raises ValueError as `encode`, and where they alone are more.
        """
        ids = self.encode(text, add_special_tokens=True)
        if len(ids) <= limit:
            return ids
        plain = self._encoding(text, False)
        kept = len(plain) - (len(ids) - limit)
        if kept < 0:
            raise ValueError(f"the tokens that are added to every text are more than {limit}")
        plain.truncate(kept, direction=side)
        return self._ids(self._backend.post_process(plain, None, True), True)

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> tuple[list[int], int | None]:
        """Two texts as one, as the tokenizer joins them; and where the second begins, if its tokens are of a type of
        their own. With a `limit` the second text loses tokens at its end.

        Raises ValueError as `encode`, and where the limit leaves none of the second text.
        """
        one, two = self._encoding(first, False), self._encoding(second, False)
        joined = self._backend.post_process(one, two, True)
        if limit is not None and len(joined) > limit:
            kept = len(two) - (len(joined) - limit)
            if kept <= 0:
                raise ValueError(f"the first text leaves nothing of {limit} tokens to the second")
            one, two = self._encoding(first, False), self._encoding(second, False)
            two.truncate(kept)
            joined = self._backend.post_process(one, two, True)
        types: list[int] = joined.type_ids
        return self._ids(joined, True), types.index(1) if 1 in types else None

    def _ids(self, encoding: Any, add_special_tokens: bool) -> list[int]:
        ids: list[int] = encoding.ids
        if self._model_rows is not None and max(ids, default=0) >= self._model_rows:
            raise ValueError(f"the text holds the token {max(ids)}, which the model has no embedding for")
        if add_special_tokens and self.adds_bos != self._backend_adds_bos:
            return [self.bos_token_id, *ids] if self.bos_token_id is not None and self.adds_bos else ids[1:]
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        """Of the library's calls only the one for batches lets other threads run meanwhile."""
        try:
            if len(text) <= LONG_TEXT_CHARS:
                return self._backend.encode(text, add_special_tokens=add_special_tokens)
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeError, TypeError):
            bad = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if bad is None:
                raise
            raise ValueError(
                f"the text is not valid Unicode: a lone surrogate U+{ord(text[bad]):04X} at character {bad}"
            ) from None

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat template, which has written its special tokens itself.

        The beginning-of-sequence token is added only if the tokenizer adds one and the template did not.
        """
        ids = self.encode(rendered, add_special_tokens=False)
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of whole sequences; bytes that are not UTF-8 become U+FFFD."""
        special = self._special if skip_special_tokens else frozenset()
        pieces = [self.token_bytes(token_id) for token_id in ids if token_id not in special]
        raw = b"".join(pieces)
        if self._strips_first_space and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; b"" for an id that the model has a row for but the tokenizer no token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spelled(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The bytes of one token as text; parts of characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of text (end of sequence, turn markers, ...)."""
        return token_id in self._special

    def token_id(self, token: str) -> int | None:
        """The id of a token by its own spelling ("<|im_end|>", "Ġthe"), None if there is none."""
        return self._id_of(token)

    def added_token_id(self, token: str) -> int | None:
        """The id of a token that was added to the vocabulary as a whole, such as a mark; None for any other text."""
        token_id = self._id_of(token)
        return token_id if token_id in self._added else None

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def _spelled(self, token_id: int) -> bytes:
        if token_id in self._added:
            content = self._added[token_id]
            marks = self._spelling == "sentencepiece" and token_id not in self._special
            return (content.replace("▁", " ") if marks else content).encode()
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._spelling == "byte-level":
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        if self._spelling == "wordpiece":
            return token.removeprefix("##").encode() if token.startswith("##") else f" {token}".encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _spelling(backend: Any, name: str) -> tuple[Literal["byte-level", "sentencepiece", "wordpiece"], bool]:
    """How tokens spell bytes, and whether a decoded text loses the space put before its first word."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    chain = state.get("decoders", [state])
    kinds = [part.get("type") for part in chain]
    if "ByteLevel" in kinds:
        return "byte-level", False
    if "WordPiece" in kinds:
        return "wordpiece", True
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        strips = any(p.get("type") == "Strip" and p.get("content") == " " and p.get("start") for p in chain)
        metaspace = any(p.get("type") == "Metaspace" and p.get("prepend_scheme", "always") != "never" for p in chain)
        return "sentencepiece", strips or metaspace
    raise ConfigError(
        f"{name}: the tokenizer's decoder {', '.join(str(k) for k in kinds)} is not supported; known are ByteLevel, "
        "Metaspace or ByteFallback (SentencePiece), and WordPiece."
    )


def _from_json(path: Path, model_eos: tuple[int, ...]) -> _Source:
    """A tokenizer.json with the tokenizer_config.json beside it."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.suffix == ".model" or (not file.exists() and (file.parent / "tokenizer.model").exists()):
        return _from_sentencepiece(file.parent / "tokenizer.model" if path.suffix != ".model" else path, model_eos)
    if not file.exists():
        hint = (
            " It has vocab.json instead; make one with `transformers.AutoTokenizer.from_pretrained(DIR)"
            ".save_pretrained(DIR)`."
            if (file.parent / "vocab.json").exists()
            else " Name another tokenizer with --tokenizer DIRECTORY."
        )
        raise ConfigError(f"{file} does not exist, and the tokenizer is read from it.{hint}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{file} is not a tokenizer.json that can be read: {error}.") from error
    config = _json_beside(file, "tokenizer_config.json")
    adds_bos = config.get("add_bos_token")
    special_tokens = _special_tokens(file, config)
    return _Source(backend, special_tokens, adds_bos if isinstance(adds_bos, bool) else None, model_eos)


def _from_sentencepiece(file: Path, model_eos: tuple[int, ...]) -> _Source:
    """A tokenizer.model with the tokenizer_config.json and added_tokens.json beside it.

    It adds the beginning-of-sequence token unless the configuration says no. `legacy: false` there means that
    only the beginning of a text gets a space before it, not also what follows a special token.
    """
    pieces = read_sentencepiece(file)
    config = _json_beside(file, "tokenizer_config.json")
    first_only = pieces.space_prefix and config.get("legacy") is False
    try:
        backend = build_backend(pieces, "first" if first_only else None)
    except Exception as error:
        raise ConfigError(f"{file}: its pieces do not fit together: {error}.") from error
    for token_id, token in sorted(_added_tokens(file, config).items()):
        if backend.token_to_id(token.content) not in (None, token_id):
            raise ConfigError(f"{file}: {token.content!r} is a piece of it, but is to be added as token {token_id}.")
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise ConfigError(
                f"{file}: {token.content!r} is to be added as token {token_id}, which leaves a gap after the "
                f"{len(pieces.pieces):,} pieces: tokens before it are missing."
            )
    ids = (pieces.bos_id, pieces.eos_id, pieces.unk_id, pieces.pad_id)
    roles = zip(_SPECIAL_NAMES, ids, strict=True)
    own = {role: pieces.pieces[token_id] for role, token_id in roles if token_id is not None}
    return _Source(
        backend, {**own, **_special_tokens(file, config)}, config.get("add_bos_token") is not False, model_eos
    )


def _added_tokens(file: Path, config: Mapping[str, object]) -> dict[int, AddedToken]:
    """Tokens beyond the pieces, from added_tokens.json and the newer `added_tokens_decoder`."""
    added: dict[int, AddedToken] = {}
    for content, token_id in _json_beside(file, "added_tokens.json").items():
        if isinstance(token_id, int):
            added[token_id] = AddedToken(content, normalized=False, special=True)
    decoder = config.get("added_tokens_decoder")
    for key, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if str(key).isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "special")}
            added[int(key)] = AddedToken(entry["content"], normalized=False, **flags)
    return added


def _json_beside(file: Path, name: str) -> dict[str, object]:
    beside = file.parent / name
    return read_json_object(beside) if beside.exists() else {}


def _special_tokens(file: Path, config: Mapping[str, object]) -> dict[str, str]:
    """The special tokens by role, the configuration's before those of special_tokens_map.json."""
    named = {**_json_beside(file, "special_tokens_map.json"), **config}
    special_tokens: dict[str, str] = {}
    for role in _SPECIAL_NAMES:
        value = named.get(role)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            special_tokens[role] = content
    return special_tokens


def _from_gguf(path: Path, header: GGUFHeader, model_eos: tuple[int, ...]) -> _Source:
    """The vocabulary in a GGUF file's metadata."""
    backend, adds_bos = backend_from_gguf(path, header)
    special_tokens: dict[str, str] = {}
    for role, key in zip(_SPECIAL_NAMES, ("bos", "eos", "unknown", "padding"), strict=True):
        token_id = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        token = backend.id_to_token(token_id) if isinstance(token_id, int) and 0 <= token_id < 1 << 31 else None
        if token is not None:
            special_tokens[role] = token
    eos = tuple(dict.fromkeys((*end_token_ids(header), *model_eos)))
    return _Source(backend, special_tokens, adds_bos, eos)
