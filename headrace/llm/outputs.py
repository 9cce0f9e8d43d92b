"""What `LLM.generate` returns, by vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.protocol.ipc import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """`rank` 1 is the likeliest; None where it was not asked for (`logprob_token_ids`)."""

    logprob: float
    rank: int | None
    decoded_token: str


TokenTable = dict[int, Logprob]
"""By token id: the token itself and the alternatives to it."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `stop_reason` is the stop string or the id from `stop_token_ids` that ended it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenTable] | None
    finish_reason: str | None
    """stop, length, repetition; error where the engine failed on this prompt (and `error` says why)."""
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt. `prompt` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenTable | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0


def token_table(report: TokenLogprobs, count: int | None, text_of: Callable[[int], str]) -> TokenTable:
    """The best `count` alternatives and the token itself; with None the listed ones, which have no ranks."""
    table: TokenTable = {}
    pairs = zip(report.top_token_ids[:count], report.top_logprobs[:count], strict=True)
    for place, (token_id, logprob) in enumerate(pairs):
        table[token_id] = Logprob(logprob, None if count is None else place + 1, text_of(token_id))
    table[report.token_id] = Logprob(report.logprob, report.rank, text_of(report.token_id))
    return table


def token_tables(
    reports: Sequence[TokenLogprobs], count: int | None, text_of: Callable[[int], str]
) -> list[TokenTable]:
    return [token_table(report, count, text_of) for report in reports]
