"""Tokens of a stream to text, a few at a time, never breaking a character.

A token is a string of bytes and may end inside a character. Bytes of an unfinished character (at most three)
wait for the next token; what can never become a character is U+FFFD at once, exactly where decoding the whole
would put it. Example, a smile in two tokens: add([F0 9F]) gives "", add([98 80]) gives "😀".

Only generated tokens are ever added, so no text of the prompt can come out. They continue the prompt, so a first
token "▁Hello" is " Hello", where Tokenizer.decode, which takes whole texts, leaves that space out.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from headrace.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence. For any way to cut the tokens into calls, the pieces join to the same text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        kept_token_ids: Collection[int] = (),
    ) -> None:
        """`kept_token_ids` are text even if they are special and those are skipped.

        `spaces_between_special_tokens` changes nothing for the byte-exact vocabularies known here: their tokens carry
        their own spaces, so none is put between them with either value.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept = frozenset(kept_token_ids)
        self._decoder = _utf8_decoder(errors="replace")

    def add(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        tokenizer, kept = self._tokenizer, self._kept
        if self._skip_special_tokens:
            raw = b"".join([tokenizer.token_bytes(t) for t in token_ids if t in kept or not tokenizer.is_special(t)])
        else:
            raw = b"".join(map(tokenizer.token_bytes, token_ids))
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """U+FFFD for a character that was left unfinished, else nothing. Call it once, at the end."""
        return self._decoder.decode(b"", final=True)
