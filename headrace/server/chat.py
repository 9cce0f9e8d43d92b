"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from headrace.protocol import errors, openai_chat
from headrace.protocol.openai_chat import ChatAnswer, ChatFields
from headrace.protocol.sampling import sampling_params, text_rules
from headrace.server.best_of import best_choices
from headrace.server.generation import GenerationRequest, generate
from headrace.server.http import Exchange
from headrace.server.replies import Tally, reply, stream_options
from headrace.server.requests import log_request, read_request
from headrace.server.serving import Serving, refused_text
from headrace.text.chat_template import ChatTemplate
from headrace.text.prompt_scores import PromptTokens

MESSAGE_CHARS = 50
"""A message takes a template as long as so many characters take the tokenizer, even if it is empty."""


async def chat_completions(serving: Serving, exchange: Exchange) -> None:
    limits = serving.limits()
    fields, sampling = await read_request(serving, exchange, ChatFields)
    serving.names.check(fields.model)
    options = stream_options(sampling, serving.settings.force_include_usage)
    rules = text_rules(sampling)
    max_tokens, max_tokens_field = openai_chat.asked_max_tokens(fields, sampling.max_tokens)
    logprobs = openai_chat.asked_logprobs(fields, limits.max_logprobs)
    bad_words = await serving.bad_words(sampling)
    priority = serving.priority(sampling)

    token_ids = await prompt_of(
        serving,
        fields.messages,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        add_special_tokens=fields.add_special_tokens,
        variables=openai_chat.template_variables(fields.chat_template_kwargs),
        documents=fields.documents,
        own_template=fields.chat_template,
    )
    token_ids = serving.truncated(token_ids, sampling, max_tokens or 1)
    params = sampling_params(
        sampling,
        serving.sampling_defaults,
        limits,
        prompt_tokens=len(token_ids),
        where="messages",
        max_tokens=max_tokens,
        fresh_seed=serving.fresh_seed,
        max_tokens_field=max_tokens_field,
        logprobs=logprobs,
        bad_words=bad_words,
    )
    head = serving.head("chatcmpl")
    log_request(serving, exchange, head.id, len(token_ids), params)
    request = GenerationRequest(
        request_id=head.id,
        token_ids=token_ids,
        params=params,
        rules=rules,
        stop_token_ids=frozenset(sampling.stop_token_ids or ()),
        ids_as_tokens=bool(sampling.return_tokens_as_token_ids),
        priority=priority,
        cache_salt=sampling.cache_salt,
        streamed=bool(sampling.stream),
    )
    answer = ChatAnswer(
        head,
        with_logprobs=logprobs is not None,
        with_token_ids=bool(sampling.return_token_ids),
        prompt_ids=token_ids,
        scores=PromptTokens(serving.tokenizer, token_ids, num_listed=sampling.prompt_logprobs)
        if sampling.prompt_logprobs is not None
        else None,
    )
    deltas = generate(serving.client, serving.tokenizer, request)
    with serving.generating():
        n = sampling.n or 1
        tally = Tally([len(token_ids)], n)
        if params.n > n:
            deltas = best_choices(deltas, of=params.n, keep=n, tally=tally)
        await reply(exchange, deltas, answer, tally, stream=bool(sampling.stream), options=options)


async def prompt_of(
    serving: Serving,
    messages: list[dict[str, object]],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    add_special_tokens: bool | None,
    variables: dict[str, Any],
    documents: list[dict[str, object]] | None = None,
    own_template: str | None = None,
) -> list[int]:
    """The token ids of a conversation. Raises ApiError (400) for messages the template cannot take.

    `own_template` is the request's, instead of the model's; it is rendered in a thread, as it may do as it likes.

    The template writes its own beginning-of-sequence token, so by default none is put before it; where the model
    wants one and the template leaves it out, the tokenizer adds it.
    """
    template = serving.template(own_template)
    if documents is not None:
        check_documents(template)
        variables = {**variables, "documents": documents}
    if continue_final_message and add_generation_prompt:
        raise errors.invalid_value(
            "continue_final_message",
            "`continue_final_message` and `add_generation_prompt` exclude each other: either the last message is "
            "continued or a new one begins.",
        )
    num_chars = sum(MESSAGE_CHARS + len(str(message.get("content"))) for message in messages)
    num_chars += len(str(documents or ""))
    tokenizer = serving.tokenizer

    def work() -> list[int]:
        plain = openai_chat.plain_messages(messages, knows_developer="developer" in template.source)
        try:
            text = template.render(
                plain,
                add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
                continue_final_message=bool(continue_final_message),
                **variables,
            )
        except ValueError as error:
            raise errors.chat_template_failed(str(error)) from None
        with refused_text("messages"):
            return tokenizer.encode(text, True) if add_special_tokens else tokenizer.encode_chat(text)

    return await serving.aside(num_chars if own_template is None else None, work)


def check_documents(template: ChatTemplate) -> None:
    """Raises ApiError (400) where documents would be left out without a word."""
    if "documents" not in template.source:
        message = "`documents` would have no effect: the model's chat template does not quote documents."
        raise errors.invalid_value("documents", message)
