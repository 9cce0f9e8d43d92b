"""POST /v1/completions."""

from __future__ import annotations

from headrace.protocol import errors, openai_completions
from headrace.protocol.json import Body
from headrace.protocol.openai_completions import DEFAULT_MAX_TOKENS, CompletionAnswer, CompletionFields, Prompt
from headrace.protocol.sampling import SamplingFields, check_token_ids, sampling_params, text_rules
from headrace.server.generation import GenerationRequest, generate_all
from headrace.server.http import Exchange
from headrace.server.replies import Tally, reply, stream_options
from headrace.server.requests import log_request, note_unknown_fields
from headrace.server.serving import Serving


async def completions(serving: Serving, exchange: Exchange) -> None:
    limits = serving.limits()
    body = Body(await exchange.body(serving.settings.max_body_bytes))
    fields, sampling = body.read(CompletionFields), body.read(SamplingFields)
    note_unknown_fields(exchange, body, sampling)
    serving.names.check(fields.model)
    options = stream_options(sampling)
    rules = text_rules(sampling)
    logprobs = openai_completions.asked_logprobs(fields)
    priority = serving.priority(sampling)
    prompts = openai_completions.prompts(fields)

    head = serving.head("cmpl")
    requests = []
    for number, prompt in enumerate(prompts):
        token_ids = await _token_ids(serving, prompt, fields.add_special_tokens is not False, limits.vocab_size)
        params = sampling_params(
            sampling,
            serving.sampling_defaults,
            limits,
            prompt_tokens=len(token_ids),
            where="prompt",
            max_tokens=sampling.max_tokens,
            fresh_seed=serving.fresh_seed,
            fallback_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=logprobs,
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
            )
        )
    n = requests[0].params.n
    answer = CompletionAnswer(
        head,
        n=n,
        echoes=[_echo(serving, prompt) if fields.echo else "" for prompt in prompts],
        with_logprobs=logprobs is not None,
        with_token_ids=bool(sampling.return_token_ids),
        prompt_ids=[request.token_ids for request in requests],
    )
    deltas = generate_all(serving.client, serving.tokenizer, requests)
    with serving.generating():
        tally = Tally([len(request.token_ids) for request in requests], n)
        await reply(exchange, deltas, answer, tally, stream=bool(sampling.stream), options=options)


async def _token_ids(serving: Serving, prompt: Prompt, add_special_tokens: bool, vocab_size: int) -> list[int]:
    if isinstance(prompt, str):
        token_ids = await serving.encode(prompt, add_special_tokens)
    else:
        check_token_ids("prompt", prompt, vocab_size)
        token_ids = prompt
    if not token_ids:
        raise errors.invalid_value("prompt", "`prompt` is empty; there is nothing to continue.")
    return token_ids


def _echo(serving: Serving, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else serving.tokenizer.decode(prompt, skip_special_tokens=False)
