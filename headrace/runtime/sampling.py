"""From sequences' sampling parameters to the rows that the sampler takes; nothing is built that no row needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.engine.plan import NewSequence
from headrace.kernels.draws import random_stream, uniforms
from headrace.kernels.ops import Int32, SampledRows, SamplingRows, TokenLists
from headrace.protocol.ipc import SamplingParams, TokenLogprobs
from headrace.runtime.grammar import GrammarState
from headrace.runtime.token_counts import TokenCounts, counted
from headrace.runtime.token_rules import TokenRules

Rules = Sequence[TokenRules | None]


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """What is kept for a sequence. `plain`: greedy, and nothing else is asked for. `fixed`: what the sampler is told
    of it stays the same from token to token, but for the draw and for what was `seen` (the prompt included) or
    `generated`, which are counted where there are penalties. `rules` None: any token may come, as far as the `grammar`
    allows it."""

    params: SamplingParams
    num_prompt_tokens: int
    stream: int
    plain: bool
    fixed: bool
    seen: TokenCounts | None = None
    generated: TokenCounts | None = None
    rules: TokenRules | None = None
    grammar: GrammarState | None = None

    @classmethod
    def of(cls, sequence: NewSequence, grammar: GrammarState | None = None) -> SequenceSampling:
        params = sequence.params
        ruled = bool(params.bad_words) or params.allowed_token_ids is not None or params.min_tokens > 0
        ruled = ruled or params.thinking is not None
        fixed = not ruled and grammar is None
        seen = TokenCounts(0) if params.repetition_penalty != 1 else None
        penalised = params.frequency_penalty != 0 or params.presence_penalty != 0
        generated = TokenCounts(sequence.num_prompt_tokens) if penalised else None
        counts = seen is not None or generated is not None
        plain = fixed and not counts and params.temperature == 0 and not params.logit_bias and params.logprobs is None
        stream = random_stream(params.seed, sequence.index)
        rules = TokenRules.of(params) if ruled else None
        return cls(params, sequence.num_prompt_tokens, stream, plain, fixed, seen, generated, rules, grammar)

    @classmethod
    def scoring(cls, num_logprobs: int) -> SequenceSampling:
        """For a row that scores a prompt token and chooses none."""
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=num_logprobs)
        return cls(params, 0, 0, plain=False, fixed=False)


def sampling_rows(
    states: Sequence[SequenceSampling],
    tokens: Sequence[NDArray[np.int32]],
    vocab_size: int,
    given: Sequence[int] = (),
    mask: NDArray[np.uint32] | None = None,
    masked: NDArray[np.uint8] | None = None,
) -> SamplingRows:
    """`tokens[i]` are all tokens of the sequence of `states[i]` so far. `given` are the tokens of the last rows,
    which only score them. `mask` and `masked` are of all rows; what is masked is by its rules too."""
    if all(state.plain for state in states):
        nothing = np.zeros(len(states), np.float32)
        return SamplingRows(temperature=nothing, uniforms=nothing)
    params = [state.params for state in states]
    rules = [None if masked is not None and masked[row] else state.rules for row, state in enumerate(states)]
    temperature = np.array([p.temperature for p in params], np.float32)
    random = temperature.any()
    draws = uniforms([s.stream for s in states], [len(t) for t in tokens]) if random else np.zeros_like(temperature)
    seen, generated = token_counts(states, tokens)
    return SamplingRows(
        temperature=temperature,
        uniforms=draws,
        top_k=_unless_all([p.top_k for p in params], 0, np.int32),
        top_p=_unless_all([p.top_p for p in params], 1.0, np.float32),
        min_p=_unless_all([p.min_p for p in params], 0.0, np.float32),
        repetition_penalty=_unless_all([p.repetition_penalty for p in params], 1.0, np.float32),
        frequency_penalty=_unless_all([p.frequency_penalty for p in params], 0.0, np.float32),
        presence_penalty=_unless_all([p.presence_penalty for p in params], 0.0, np.float32),
        seen=seen,
        generated=generated,
        logit_bias=_weighted([p.logit_bias or {} for p in params]),
        forbidden=_forbidden(rules, states, tokens, vocab_size),
        allowed=_allowed(rules, states, tokens),
        mask=mask,
        masked=masked,
        given=_given(len(states) - len(given), given),
        scored=_scored(params),
        num_logprobs=max((p.logprobs for p in params if p.logprobs is not None), default=None),
    )


def token_counts(
    states: Sequence[SequenceSampling], tokens: Sequence[NDArray[np.int32]]
) -> tuple[TokenLists | None, TokenLists | None]:
    """`seen` and `generated` of `SamplingRows`."""
    for state, own in zip(states, tokens, strict=True):
        for counts in (state.seen, state.generated):
            if counts is not None:
                counts.follow(own)
    return counted([state.seen for state in states]), counted([state.generated for state in states])


def token_logprobs(sampled: SampledRows, row: int, count: int) -> TokenLogprobs:
    """The report of one row, with `count` alternatives."""
    assert sampled.logprobs is not None
    assert sampled.ranks is not None
    assert sampled.top_token_ids is not None
    assert sampled.top_logprobs is not None
    return TokenLogprobs(
        token_id=int(sampled.token_ids[row]),
        logprob=float(sampled.logprobs[row]),
        rank=int(sampled.ranks[row]),
        top_token_ids=sampled.top_token_ids[row, :count].tolist(),
        top_logprobs=sampled.top_logprobs[row, :count].tolist(),
    )


def listed_logprobs(sampled: SampledRows, row: int, scored: TokenLists) -> TokenLogprobs:
    """The report of one row whose alternatives are its tokens of `scored`."""
    assert sampled.scored_logprobs is not None
    own = slice(scored.starts[row], scored.starts[row + 1])
    return msgspec.structs.replace(
        token_logprobs(sampled, row, 0),
        top_token_ids=scored.token_ids[own].tolist(),
        top_logprobs=sampled.scored_logprobs[own].tolist(),
    )


def _forbidden(
    rules: Rules, states: Sequence[SequenceSampling], tokens: Sequence[NDArray[np.int32]], vocab_size: int
) -> TokenLists | None:
    if not any(rule is not None and rule.forbids for rule in rules):
        return None
    lists = [
        rule.forbidden(t[s.num_prompt_tokens :], vocab_size) if rule is not None else t[:0]
        for rule, s, t in zip(rules, states, tokens, strict=True)
    ]
    return _counted(lists)


def _allowed(
    rules: Rules, states: Sequence[SequenceSampling], tokens: Sequence[NDArray[np.int32]]
) -> TokenLists | None:
    only = [
        rule.only(t[s.num_prompt_tokens :]) if rule is not None else None
        for rule, s, t in zip(rules, states, tokens, strict=True)
    ]
    if all(one is None for one in only):
        return None
    nothing = np.zeros(0, np.int32)
    lists = [nothing if one is None else one for one in only]
    return _token_lists(lists, lists)


def _given(num_choosing: int, given: Sequence[int]) -> Int32 | None:
    return np.array([-1] * num_choosing + list(given), np.int32) if given else None


def _scored(params: Sequence[SamplingParams]) -> TokenLists | None:
    if not any(p.logprob_token_ids for p in params):
        return None
    lists = [np.array(p.logprob_token_ids or (), np.int32) for p in params]
    return _token_lists(lists, lists)


def _unless_all(values: Sequence[float], neutral: float, dtype: type) -> NDArray | None:
    return None if all(value == neutral for value in values) else np.array(values, dtype)


def _counted(lists: Sequence[NDArray[np.int32] | Sequence[int]]) -> TokenLists | None:
    """Each row's distinct tokens with how often they occur; None when every row is empty."""
    if not any(len(tokens) for tokens in lists):
        return None
    pairs = [np.unique(np.asarray(tokens, np.int32), return_counts=True) for tokens in lists]
    return _token_lists([token for token, _ in pairs], [count for _, count in pairs])


def _weighted(biases: Sequence[dict[int, float]]) -> TokenLists | None:
    if not any(biases):
        return None
    tokens = [np.array(list(bias), np.int32) for bias in biases]
    return _token_lists(tokens, [np.array(list(bias.values()), np.float32) for bias in biases])


def _token_lists(tokens: Sequence[NDArray], numbers: Sequence[NDArray]) -> TokenLists:
    starts = np.concatenate([[0], np.cumsum([len(t) for t in tokens])]).astype(np.int32)
    return TokenLists(starts, np.concatenate(tokens), np.concatenate(numbers).astype(np.float32))
