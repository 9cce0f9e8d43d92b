"""One prompt on its way through the engine: what was asked, and what has come of it so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.llm.outputs import CompletionOutput, RequestOutput, TokenTable, token_tables
from headrace.llm.params import SamplingParams
from headrace.protocol import ipc
from headrace.protocol.answers import Delta
from headrace.protocol.sampling import TextRules
from headrace.text.choice import Choice, joined
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt ready for the engine."""

    prompt: str | None
    token_ids: list[int]
    asked: SamplingParams
    params: ipc.SamplingParams
    rules: TextRules
    priority: int = 0


class OpenRequest:
    """Collects the outputs of one job; `add` says which sequences the engine may stop."""

    def __init__(self, request_id: str, job: Job, tokenizer: Tokenizer) -> None:
        self.request_id = request_id
        self.job = job
        self._tokenizer = tokenizer
        stop_token_ids = frozenset(job.asked.stop_token_ids or ())
        self._choices = [
            Choice(index, tokenizer, job.params, job.rules, stop_token_ids=stop_token_ids)
            for index in range(job.params.n)
        ]
        self._deltas: list[list[Delta]] = [[] for _ in self._choices]
        self._reports: list[list[ipc.TokenLogprobs]] = [[] for _ in self._choices]
        self._prompt_reports: list[ipc.TokenLogprobs] = []
        self._errors: dict[int, str] = {}
        self._cached_tokens = 0
        self._open = set(range(job.params.n))

    @property
    def done(self) -> bool:
        return not self._open

    def add(self, output: ipc.SequenceOutput) -> bool:
        """Take in what a step gave. True: the text ended the sequence, which the engine would still go on with."""
        index = output.index
        if index not in self._open:
            return False
        self._prompt_reports += output.prompt_logprobs or ()
        self._reports[index] += output.logprobs or ()
        self._cached_tokens = max(self._cached_tokens, output.num_cached_tokens)
        choice = self._choices[index]
        self._deltas[index] += choice.add(output)
        if output.finish_reason == "error":
            self._errors[index] = output.error or "The engine failed on this prompt."
        if choice.finished or output.finish_reason is not None:
            self._open.discard(index)
            return output.finish_reason is None
        return False

    def result(self, number: int) -> RequestOutput:
        """When `done`: the best of its choices first where there are more than were asked for."""
        job, n = self.job, self.job.asked.n
        outputs = [self._output(index) for index in range(job.params.n)]
        if len(outputs) > n:
            outputs.sort(key=lambda output: output.cumulative_logprob or 0.0, reverse=True)
        return RequestOutput(
            request_id=str(number),
            prompt=job.prompt,
            prompt_token_ids=job.token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            outputs=[_renumbered(output, index) for index, output in enumerate(outputs[:n])],
            num_cached_tokens=self._cached_tokens,
        )

    def _output(self, index: int) -> CompletionOutput:
        asked = self.job.asked
        whole = joined(self._deltas[index]) if self._deltas[index] else Delta(index, "", (), finish_reason="error")
        reports: Sequence[ipc.TokenLogprobs] = self._reports[index][: len(whole.token_ids)]
        scored = self.job.params.logprobs is not None
        shown = asked.logprobs is not None or bool(asked.logprob_token_ids)
        count = None if asked.logprob_token_ids else asked.logprobs
        return CompletionOutput(
            index=index,
            text=whole.text if asked.detokenize else "",
            token_ids=list(whole.token_ids),
            cumulative_logprob=sum(report.logprob for report in reports) if scored else None,
            logprobs=token_tables(reports, count, self._tokenizer.token_text) if shown else None,
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
            error=self._errors.get(index),
        )

    def _prompt_logprobs(self) -> list[TokenTable | None] | None:
        count = self.job.params.prompt_logprobs
        if count is None:
            return None
        return [None, *token_tables(self._prompt_reports, count, self._tokenizer.token_text)]


def _renumbered(output: CompletionOutput, index: int) -> CompletionOutput:
    return output if output.index == index else dataclasses.replace(output, index=index)
