"""Run requests through an engine in this process and collect every sequence's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.core import EngineCore
from headrace.protocol.ipc import AddRequest, SamplingParams, SequenceOutput, TokenLogprobs


@dataclass
class Sequence:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


def request(request_id: str, token_ids: list[int], **params: object) -> AddRequest:
    return AddRequest(request_id=request_id, token_ids=token_ids, params=SamplingParams(**params), arrival_s=0.0)  # type: ignore[arg-type]


def collect(outputs: Iterable[SequenceOutput], into: dict[tuple[str, int], Sequence]) -> None:
    for output in outputs:
        sequence = into.setdefault((output.request_id, output.index), Sequence())
        assert sequence.finish_reason is None, f"{output.request_id} spoke after its end"
        sequence.token_ids += output.token_ids
        sequence.num_cached_tokens = max(sequence.num_cached_tokens, output.num_cached_tokens)
        sequence.num_preemptions = max(sequence.num_preemptions, output.num_preemptions)
        sequence.logprobs += output.logprobs or ()
        sequence.prompt_logprobs += output.prompt_logprobs or ()
        sequence.finish_reason = output.finish_reason
        sequence.error = output.error


def run(core: EngineCore, requests: Iterable[AddRequest], max_steps: int = 20_000) -> dict[tuple[str, int], Sequence]:
    """Add all requests at once and step until nothing is left. Every block must have come back."""
    sequences: dict[tuple[str, int], Sequence] = {}
    for r in requests:
        refusal = core.add(r)
        assert refusal is None, refusal
    for _ in range(max_steps):
        if not core.has_work:
            if not core.gate.is_waiting:
                break
            core.gate.wait()
        output = core.step()
        assert not (refused := core.gate.take_refused()), refused
        if output is not None:
            collect(output.outputs, sequences)
    assert not core.has_work, "requests were left unfinished"
    core.check_integrity()
    return sequences


def tokens(sequences: dict[tuple[str, int], Sequence]) -> dict[tuple[str, int], list[int]]:
    return {key: sequence.token_ids for key, sequence in sequences.items()}
