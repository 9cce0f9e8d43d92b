"""What a request may say of single tokens: which may come, which may not, when it is enough, where a prompt is cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from headrace.protocol import errors
from headrace.protocol.ipc import RepetitionDetection

MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 1024
MAX_LOGPROB_TOKEN_IDS = 1024
MAX_PATTERN_TOKENS = 1024
MAX_REPEATED_TOKENS = 65536
ANY_VOCABULARY = 2**31
"""More tokens than any model has, where it is not known which model is meant."""

TruncationSide = Literal["left", "right"]
WordTokens = tuple[tuple[int, ...], ...]


class RepetitionFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`repetition_detection`. A pattern of 0 tokens is none: `max_pattern_size` 0 switches it off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


def check_token_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises ApiError (400) naming the first id that the vocabulary does not have."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        known = vocab_size < ANY_VOCABULARY
        allowed = f"this model's vocabulary is 0 to {vocab_size - 1}" if known else "no vocabulary has it"
        raise errors.invalid_value(param, f"`{param}` holds the token id {errors.quoted(wrong)}; {allowed}.")


def check_bad_words(words: Sequence[str] | None) -> Sequence[str]:
    """Raises ApiError (400) for an empty, very long or very numerous bad word."""
    if words is None:
        return ()
    if len(words) > MAX_BAD_WORDS:
        message = f"`bad_words` has {len(words)} words; at most {MAX_BAD_WORDS} are allowed."
        raise errors.invalid_value("bad_words", message)
    for word in words:
        if not word.strip():
            raise errors.invalid_value("bad_words", "`bad_words` holds an empty string, which would forbid everything.")
        if len(word) > MAX_BAD_WORD_CHARS:
            raise errors.invalid_value(
                "bad_words", f"a word in `bad_words` is longer than {MAX_BAD_WORD_CHARS} characters."
            )
    return words


def allowed_tokens(
    asked: Sequence[int] | None, bad_words: WordTokens, not_yet: Collection[int], vocab_size: int
) -> tuple[int, ...] | None:
    """`allowed_token_ids`, checked: whatever was generated, some token must be left to come next.

    `not_yet` are stop tokens that may not come while the answer is shorter than `min_tokens`. Raises ApiError (400).
    """
    barred = {word[-1] for word in bad_words} | set(not_yet)
    if asked is None:
        if len(barred) >= vocab_size:
            raise errors.invalid_value("bad_words", "`bad_words` and the stop tokens leave no token to generate.")
        return None
    if not asked:
        raise errors.invalid_value("allowed_token_ids", "`allowed_token_ids` is empty, so nothing could be generated.")
    check_token_ids("allowed_token_ids", asked, vocab_size)
    if not set(asked) - barred:
        raise errors.invalid_value(
            "allowed_token_ids",
            "every token of `allowed_token_ids` ends one of `bad_words`, or is a stop token that `min_tokens` keeps "
            "back: there could be no token left to generate. Allow one more.",
        )
    return tuple(dict.fromkeys(asked))


def listed_tokens(asked: Sequence[int] | None, logprobs: int | None, vocab_size: int) -> tuple[int, ...] | None:
    """`logprob_token_ids`, checked. Raises ApiError (400)."""
    if not asked:
        return None
    if logprobs is None:
        message = "`logprob_token_ids` has an effect only together with `logprobs`."
        raise errors.invalid_value("logprob_token_ids", message)
    if len(asked) > MAX_LOGPROB_TOKEN_IDS:
        message = f"`logprob_token_ids` has {len(asked)} tokens; at most {MAX_LOGPROB_TOKEN_IDS} are allowed."
        raise errors.invalid_value("logprob_token_ids", message)
    check_token_ids("logprob_token_ids", asked, vocab_size)
    return tuple(dict.fromkeys(asked))


def repetition_detection(asked: RepetitionFields | None) -> RepetitionDetection | None:
    """The rule, None where it is off. Raises ApiError (400) for one that could never or always hold."""
    if asked is None or asked.max_pattern_size == 0:
        return None
    path = "repetition_detection"
    largest, smallest, count = asked.max_pattern_size, asked.min_pattern_size or 1, asked.min_count
    if not 1 <= largest <= MAX_PATTERN_TOKENS:
        raise errors.out_of_range(f"{path}.max_pattern_size", largest, f"between 0 (off) and {MAX_PATTERN_TOKENS}")
    if not 1 <= smallest <= largest:
        raise errors.out_of_range(f"{path}.min_pattern_size", smallest, f"between 1 and the largest, {largest}")
    if not 2 <= count <= MAX_REPEATED_TOKENS // largest:
        allowed = f"between 2 and {MAX_REPEATED_TOKENS // largest}"
        raise errors.out_of_range(f"{path}.min_count", count, allowed)
    return RepetitionDetection(largest, smallest, count)


def truncated(
    token_ids: list[int],
    asked: int | None,
    side: TruncationSide | None,
    *,
    max_model_len: int,
    max_tokens: int,
) -> list[int]:
    """The prompt cut to `truncate_prompt_tokens`: its end unless `side` is "right", which keeps the beginning.

    -1 keeps what leaves room for `max_tokens`. Raises ApiError (400).
    """
    if asked is None:
        return token_ids
    if asked != -1 and not 1 <= asked <= max_model_len:
        allowed = f"-1 (what leaves room for the answer), or between 1 and {max_model_len}"
        raise errors.out_of_range("truncate_prompt_tokens", asked, allowed)
    keep = asked if asked != -1 else max(1, max_model_len - max_tokens)
    return token_ids[:keep] if side == "right" else token_ids[-keep:]
