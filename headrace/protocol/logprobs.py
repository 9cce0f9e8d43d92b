"""Log-probabilities on the wire: chat's list of entries, the parallel lists of the older completions, and vLLM's
`prompt_logprobs`, a list with {token id: {logprob, rank, decoded_token}} for every token of the prompt.

JSON has no minus infinity; it is written as -9999.0, on every route.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.protocol.ipc import TokenLogprobs

SMALLEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token with its log-probability. `bytes` are exact also where `token` is only part of a character.

    `logprob` None: nothing came before it, so it has none (the first token of a prompt).
    """

    token: str
    bytes: tuple[int, ...]
    logprob: float | None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, the alternatives to it (best first), and where its text begins in the answer's text."""

    chosen: TokenScore
    top: tuple[TokenScore, ...]
    text_offset: int


class PromptScores(Protocol):
    """What an answer says of its prompt's tokens. Nothing before `take`, which is called once."""

    def take(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Those of all tokens but the first."""
        ...

    def echoed(self) -> Sequence[ScoredToken]:
        """All tokens, for an answer that repeats the prompt; empty if it does not."""
        ...

    def listed(self) -> list[dict[str, object] | None] | None:
        """`prompt_logprobs`; None if they were not asked for."""
        ...


def finite(logprob: float | None) -> float | None:
    """As JSON can say it."""
    if logprob is None:
        return None
    return max(logprob, SMALLEST_LOGPROB) if not math.isnan(logprob) else SMALLEST_LOGPROB


def chat_logprobs(tokens: Iterable[ScoredToken]) -> dict[str, object]:
    content = [{**_entry(token.chosen), "top_logprobs": [_entry(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Iterable[ScoredToken], offset: int) -> dict[str, list[object]]:
    """`offset` is added to each text offset: the length of an echoed prompt. The chosen token is always in `top`."""
    scored = list(tokens)
    return {
        "tokens": [token.chosen.token for token in scored],
        "token_logprobs": [finite(token.chosen.logprob) for token in scored],
        "top_logprobs": [
            None
            if token.chosen.logprob is None
            else {score.token: finite(score.logprob) for score in (*token.top, token.chosen)}
            for token in scored
        ],
        "text_offset": [offset + token.text_offset for token in scored],
    }


def _entry(score: TokenScore) -> dict[str, object]:
    return {"token": score.token, "logprob": finite(score.logprob), "bytes": list(score.bytes)}
