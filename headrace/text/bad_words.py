"""Words that may not be said, as the token sequences that would say them.

A word begins a line or follows a space, and has other tokens in each case; both are forbidden. How it is spelled
inside a longer word is not looked for: "cat" does not forbid "category".
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.text.tokenizer import Tokenizer

_ANCHOR = "\n"
"""What stands before the text while it is tokenized: some tokenizers put a space before a text's first word."""


def bad_word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of all words, each once. Raises ValueError for text that is not valid Unicode."""
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, " " + bare):
            token_ids = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
            if token_ids[: len(anchor)] == anchor:
                token_ids = token_ids[len(anchor) :]
            else:
                token_ids = tokenizer.encode(text, add_special_tokens=False)
            if token_ids:
                found[tuple(token_ids)] = None
    return tuple(found)
