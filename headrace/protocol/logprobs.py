"""Log-probabilities on the wire: chat's list of entries, and the parallel lists of the older completions.

JSON has no minus infinity; it is written as -9999.0, on every route.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

SMALLEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token with its log-probability. `bytes` are exact also where `token` is only part of a character."""

    token: str
    bytes: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token, the best alternatives (best first), and where its text begins in the answer's text."""

    chosen: TokenScore
    top: tuple[TokenScore, ...]
    text_offset: int


def finite(logprob: float) -> float:
    return max(logprob, SMALLEST_LOGPROB) if not math.isnan(logprob) else SMALLEST_LOGPROB


def chat_logprobs(tokens: Iterable[ScoredToken]) -> dict[str, object]:
    content = [{**_entry(token.chosen), "top_logprobs": [_entry(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Iterable[ScoredToken], offset: int) -> dict[str, object]:
    """`offset` is added to each text offset: the length of an echoed prompt. The chosen token is always in `top`."""
    scored = list(tokens)
    return {
        "tokens": [token.chosen.token for token in scored],
        "token_logprobs": [finite(token.chosen.logprob) for token in scored],
        "top_logprobs": [
            {score.token: finite(score.logprob) for score in (*token.top, token.chosen)} for token in scored
        ],
        "text_offset": [offset + token.text_offset for token in scored],
    }


def _entry(score: TokenScore) -> dict[str, object]:
    return {"token": score.token, "logprob": finite(score.logprob), "bytes": list(score.bytes)}
