"""What a step's results do to a sequence: its tokens are taken in, up to one that ends it, and log-probabilities of its
prompt are given out once."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.engine.plan import Sampled, SequenceStep
from headrace.engine.repetition import repeats
from headrace.engine.request import Request, Sequence
from headrace.protocol.ipc import FinishReason, TokenLogprobs


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """The first `num_tokens` of the sampled ones belong to the sequence. `finish_reason` None: it goes on."""

    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


def accept_tokens(seq: Sequence, sampled: Sampled) -> Accepted:
    """Append the tokens to the sequence, up to the one that ends it. A complete grammar ends it before `min_tokens`."""
    params = seq.request.params
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


def unreported(
    request: Request, step: SequenceStep, scored: Mapping[int, tuple[TokenLogprobs, ...]]
) -> list[TokenLogprobs]:
    """What the step scored and nobody had before: a preemption has rows scored twice. RuntimeError if it is missing."""
    if len(scored.get(step.seq_id, ())) != step.num_scored:
        raise RuntimeError(f"a step gave no log-probabilities of the prompt of sequence {step.seq_id}, which scores it")
    fresh = list(scored[step.seq_id][max(0, request.num_scored_tokens - step.start) :])
    request.num_scored_tokens += len(fresh)
    return fresh
