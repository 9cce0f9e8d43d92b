"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec

from headrace.protocol import errors, openai_completions
from headrace.protocol.answers import Delta
from headrace.protocol.openai_completions import DEFAULT_MAX_TOKENS, CompletionAnswer, CompletionFields, Prompt
from headrace.protocol.sampling import sampling_params, text_rules
from headrace.protocol.token_limits import check_token_ids
from headrace.server.best_of import best_choices
from headrace.server.generation import GenerationRequest, generate_all
from headrace.server.http import Exchange
from headrace.server.replies import Tally, reply, stream_options
from headrace.server.requests import log_request, read_request
from headrace.server.serving import Serving
from headrace.text.prompt_scores import PromptTokens

PROMPTS_AT_ONCE = 16
"""Of one request, made ready before others get their turn."""


async def completions(serving: Serving, exchange: Exchange) -> None:
    limits = serving.limits()
    fields, sampling = await read_request(serving, exchange, CompletionFields)
    serving.names.check(fields.model)
    options = stream_options(sampling, serving.settings.force_include_usage)
    rules = text_rules(sampling)
    logprobs = openai_completions.asked_logprobs(fields, limits.max_logprobs)
    only_scores = openai_completions.only_scores(fields, sampling.max_tokens, sampling.prompt_logprobs)
    bad_words = await serving.bad_words(sampling)
    grammar = await serving.grammar(exchange, sampling)
    priority = serving.priority(exchange, sampling)
    prompts = openai_completions.prompts(fields)
    serving.check_sequences(len(prompts), sampling)
    read = await serving.encode(prompts, fields.add_special_tokens is not False)
    serving.check_queued_tokens(read)

    head = serving.head("cmpl")
    requests, echoes, scores = [], [], []
    for number, (prompt, whole) in enumerate(zip(prompts, read, strict=True)):
        if number % PROMPTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        if not whole:
            raise errors.invalid_value("prompt", "`prompt` is empty; there is nothing to continue.")
        if not isinstance(prompt, str):
            check_token_ids("prompt", prompt, limits.vocab_size)
        token_ids = serving.truncated(whole, sampling, sampling.max_tokens or DEFAULT_MAX_TOKENS)
        params = sampling_params(
            sampling,
            serving.sampling_defaults,
            limits,
            prompt_tokens=len(token_ids),
            where="prompt",
            max_tokens=1 if only_scores else sampling.max_tokens,
            fresh_seed=serving.fresh_seed,
            fallback_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=logprobs,
            echo_logprobs=logprobs if fields.echo else None,
            bad_words=bad_words,
            grammar=grammar,
        )
        log_request(serving, exchange, head.id, len(token_ids), params)
        requests.append(
            GenerationRequest(
                request_id=f"{head.id}-{number}",
                token_ids=token_ids,
                params=params,
                rules=rules,
                stop_token_ids=frozenset(sampling.stop_token_ids or ()),
                ids_as_tokens=bool(sampling.return_tokens_as_token_ids),
                priority=priority,
                cache_salt=sampling.cache_salt,
                streamed=bool(sampling.stream),
            )
        )
        echo = _echo(serving, prompt if len(token_ids) == len(whole) else token_ids) if fields.echo else ""
        echoes.append(echo)
        if params.prompt_logprobs is not None:
            scores.append(
                PromptTokens(
                    serving.tokenizer,
                    token_ids,
                    echo=echo if fields.echo else None,
                    num_echoed=logprobs or 0,
                    num_listed=sampling.prompt_logprobs,
                    ids_as_tokens=bool(sampling.return_tokens_as_token_ids),
                )
            )
    n, of = sampling.n or 1, requests[0].params.n
    answer = CompletionAnswer(
        head,
        n=n,
        echoes=echoes,
        with_logprobs=logprobs is not None,
        with_token_ids=bool(sampling.return_token_ids),
        prompt_ids=[request.token_ids for request in requests],
        scores=scores,
    )
    deltas = generate_all(serving.client, serving.tokenizer, requests)
    if only_scores:
        deltas = _without_tokens(deltas)
    with serving.generating():
        tally = Tally([len(request.token_ids) for request in requests], n)
        if of > n:
            deltas = best_choices(deltas, of=of, keep=n, tally=tally)
        await reply(exchange, deltas, answer, tally, stream=bool(sampling.stream), options=options)


async def _without_tokens(deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    """`max_tokens` 0: the one token that the engine generated is left out."""
    async with aclosing(deltas) as stream:  # type: ignore[type-var]
        async for delta in stream:
            if delta.prompt_logprobs is not None:
                yield delta
            elif delta.finish_reason is not None:
                tokens = None if delta.tokens is None else ()
                yield msgspec.structs.replace(
                    delta, text="", token_ids=(), tokens=tokens, finish_reason="length", stop_reason=None
                )


def _echo(serving: Serving, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else serving.tokenizer.decode(prompt, skip_special_tokens=False)
