"""What a step's results do to a sequence: its tokens are taken in, up to one that ends it, and log-probabilities of its
prompt are given out once."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.engine.plan import Sampled, SequenceStep
from headrace.engine.repetition import repeats
from headrace.engine.request import Request, Sequence
from headrace.protocol.ipc import FinishReason, SequenceOutput, TokenLogprobs


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """The first `num_tokens` of the sampled ones belong to the sequence. `finish_reason` None: it goes on."""

    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


def accept_tokens(seq: Sequence, sampled: Sampled) -> Accepted:
    """Append the tokens to the sequence, up to the one that ends it. A complete grammar ends it before `min_tokens`."""
    params = seq.params
    if sampled.dead_end is not None:
        return Accepted(0, "error")
    if sampled.pooled is not None:
        return Accepted(0, "stop")
    token_ids = seq.token_ids
    for place, token_id in enumerate(sampled.token_ids, 1):
        token_ids.append(token_id)
        num_generated = len(token_ids) - seq.num_prompt_tokens
        stops = token_id in params.stop_token_ids
        if stops and num_generated > params.min_tokens:
            return Accepted(place, "stop", token_id)
        if sampled.complete and place == len(sampled.token_ids):
            return Accepted(place, "stop", token_id if stops else None)
        if len(token_ids) >= seq.most_tokens:
            return Accepted(place, "length")
        rule = params.repetition_detection
        if rule is not None and num_generated >= params.min_tokens and repeats(token_ids, seq.num_prompt_tokens, rule):
            return Accepted(place, "repetition")
    return Accepted(len(sampled.token_ids))


def taken_in(seq: Sequence, sampled: Sampled, prompt_logprobs: list[TokenLogprobs] | None) -> SequenceOutput:
    """The tokens accepted, and what the sequence's reader is told of them; with the first ones, how they came."""
    is_first = len(seq.token_ids) == seq.num_prompt_tokens
    accepted = accept_tokens(seq, sampled)
    return SequenceOutput(
        request_id=seq.name,
        index=seq.index,
        token_ids=list(sampled.token_ids[: accepted.num_tokens]),
        logprobs=None if sampled.logprobs is None else list(sampled.logprobs[: accepted.num_tokens]),
        prompt_logprobs=prompt_logprobs,
        pooled=sampled.pooled,
        finish_reason=accepted.finish_reason,
        stop_token_id=accepted.stop_token_id,
        error=sampled.dead_end,
        error_code="grammar_dead_end" if sampled.dead_end is not None else "engine_error",
        num_cached_tokens=seq.request.num_cached_tokens if is_first else 0,
        queue_s=(seq.queue_s or 0.0) if is_first else 0.0,
        num_preemptions=seq.num_preemptions,
    )


def scores_of(seq: Sequence, prompt_logprobs: list[TokenLogprobs]) -> SequenceOutput:
    return SequenceOutput(request_id=seq.name, index=seq.index, token_ids=[], prompt_logprobs=prompt_logprobs)


def failed(seq: Sequence, index: int, message: str) -> SequenceOutput:
    """The end of sequence `index` of its request, which could not be computed."""
    return SequenceOutput(
        request_id=seq.name,
        index=index,
        token_ids=[],
        finish_reason="error",
        error=message,
        num_preemptions=seq.num_preemptions,
    )


def unreported(
    request: Request, step: SequenceStep, scored: Mapping[int, tuple[TokenLogprobs, ...]]
) -> list[TokenLogprobs]:
    """What the step scored and nobody had before: a preemption has rows scored twice. RuntimeError if it is missing."""
    if len(scored.get(step.seq_id, ())) != step.num_scored:
        raise RuntimeError(f"a step gave no log-probabilities of the prompt of sequence {step.seq_id}, which scores it")
    fresh = list(scored[step.seq_id][max(0, request.num_scored_tokens - step.start) :])
    request.num_scored_tokens += len(fresh)
    return fresh
