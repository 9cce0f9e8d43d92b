"""POST /v1/chat/completions; and a conversation's way to the engine, whatever dialect it came in.

messages, tools ─► template ─► tokens ─► engine ─► deltas with reasoning, content and tool calls
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.protocol import errors, openai_chat
from headrace.protocol.answers import AnswerHead, Content, Delta
from headrace.protocol.openai_chat import ChatAnswer, ChatFields
from headrace.protocol.sampling import SamplingFields, sampling_params, text_rules
from headrace.protocol.tools import ToolRequest, tool_request
from headrace.server.best_of import best_choices
from headrace.server.chat_format import ChatFormat
from headrace.server.generation import GenerationRequest, generate
from headrace.server.http import Exchange
from headrace.server.parsed import parsed
from headrace.server.replies import Tally, reply, stream_options
from headrace.server.requests import log_request, read_request
from headrace.server.serving import Serving, refused_text
from headrace.text.chat_template import ChatTemplate
from headrace.text.prompt_scores import PromptTokens
from headrace.text.reasoning import opened_in
from headrace.text.tool_grammar import tool_grammar
from headrace.text.tool_prompt import prepared

MESSAGE_CHARS = 50
"""A message takes a template as long as so many characters take the tokenizer, even if it is empty."""


async def chat_completions(serving: Serving, exchange: Exchange) -> None:
    serving.ready_info()
    fields, sampling = await read_request(serving, exchange, ChatFields)
    options = stream_options(sampling, serving.settings.force_include_usage)
    echo = openai_chat.echoed(fields)
    chat = await begin_chat(serving, exchange, fields, sampling, prefix="chatcmpl")
    answer = ChatAnswer(
        chat.head,
        with_logprobs=bool(fields.logprobs),
        with_token_ids=bool(sampling.return_token_ids),
        prompt_ids=chat.prompt_ids,
        scores=PromptTokens(serving.tokenizer, chat.prompt_ids, num_listed=sampling.prompt_logprobs)
        if sampling.prompt_logprobs is not None
        else None,
    )
    deltas = _behind(echo, chat.deltas) if echo else chat.deltas
    with serving.generating():
        await reply(exchange, deltas, answer, chat.tally, stream=bool(sampling.stream), options=options)


async def _behind(text: str, deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    """Every choice begins with `text`."""
    begun: set[int] = set()
    async with aclosing(deltas) as stream:  # type: ignore[type-var]
        async for delta in stream:
            if delta.prompt_logprobs is None and delta.index not in begun:
                begun.add(delta.index)
                parts = None if delta.parts is None else (Content(text), *delta.parts)
                delta = msgspec.structs.replace(delta, text=text + delta.text, parts=parts)
            yield delta


@dataclass(frozen=True)
class Chat:
    """A conversation whose answer is on its way: `deltas` begin to be generated when they are read."""

    head: AnswerHead
    prompt_ids: list[int]
    deltas: AsyncIterator[Delta]
    tally: Tally


async def begin_chat(
    serving: Serving,
    exchange: Exchange,
    fields: ChatFields,
    sampling: SamplingFields,
    *,
    prefix: str,
    shortens_answer: bool = False,
    where: str = "messages",
) -> Chat:
    """Everything that can be refused is refused here. Raises ApiError (400, 404, 503).

    `prefix` begins the answer's id. `shortens_answer`: where `max_tokens` is more than fits, it is what fits.
    `where`: the client's word for what the prompt is made of.
    """
    limits = serving.limits()
    serving.names.check(fields.model)
    serving.check_sequences(1, sampling)
    max_tokens, max_tokens_field = openai_chat.asked_max_tokens(fields, sampling.max_tokens)
    logprobs = openai_chat.asked_logprobs(fields, limits.max_logprobs)
    bad_words = await serving.bad_words(sampling)
    priority = serving.priority(exchange, sampling)
    format = serving.chat_format(fields.chat_template)
    tools = tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    prompt = await prompt_of(
        serving,
        format,
        fields.messages,
        tools=tools,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        add_special_tokens=fields.add_special_tokens,
        variables=format.variables(fields, exchange),
        documents=fields.documents,
        in_thread=fields.chat_template is not None,
    )
    reading = format.reading(fields, tools, is_thinking=prompt.is_thinking)
    token_ids = serving.truncated(prompt.token_ids, sampling, max_tokens or 1)
    if shortens_answer and max_tokens is not None:
        max_tokens = min(max_tokens, max(1, limits.max_model_len - len(token_ids)))
    grammar = await serving.grammar(exchange, sampling)
    after = format.closing_ids if prompt.is_thinking else ()
    if grammar is not None and after:
        grammar = msgspec.structs.replace(grammar, after_token_ids=after)
    if tools.tools and reading.tools is not None:
        marks = {mark: serving.tokenizer.added_token_id(mark) for mark in reading.tools.marks}
        special = {mark: token_id for mark, token_id in marks.items() if token_id is not None}
        grammar = tool_grammar(tools, reading.tools, special_tokens=special, answer=grammar, after=after)
    params = sampling_params(
        sampling,
        serving.sampling_defaults,
        limits,
        prompt_tokens=len(token_ids),
        where=where,
        max_tokens=max_tokens,
        fresh_seed=serving.fresh_seed,
        max_tokens_field=max_tokens_field,
        logprobs=logprobs,
        bad_words=bad_words,
        grammar=grammar,
        thinking=format.budget(fields.thinking_token_budget, is_thinking=prompt.is_thinking),
    )
    head = serving.head(prefix)
    log_request(serving, exchange, head.id, len(token_ids), params)
    request = GenerationRequest(
        request_id=head.id,
        token_ids=token_ids,
        params=params,
        rules=dataclasses.replace(text_rules(sampling), kept_token_ids=reading.kept_token_ids(serving.tokenizer)),
        stop_token_ids=frozenset(sampling.stop_token_ids or ()),
        ids_as_tokens=bool(sampling.return_tokens_as_token_ids),
        priority=priority,
        cache_salt=sampling.cache_salt,
        streamed=bool(sampling.stream),
    )
    n = sampling.n or 1
    tally = Tally([len(token_ids)], n)
    deltas = generate(serving.client, serving.tokenizer, request)
    if params.n > n:
        deltas = best_choices(deltas, of=params.n, keep=n, tally=tally)
    if not reading.is_plain:
        deltas = parsed(deltas, reading, serving.client, head.id, n)
    return Chat(head, token_ids, deltas, tally)


@dataclass(frozen=True)
class Prompt:
    """`is_thinking`: it ends inside the marks of thinking."""

    token_ids: list[int]
    is_thinking: bool


async def prompt_of(
    serving: Serving,
    format: ChatFormat,
    messages: list[dict[str, object]],
    *,
    tools: ToolRequest,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    add_special_tokens: bool | None,
    variables: dict[str, Any],
    documents: list[dict[str, object]] | None = None,
    in_thread: bool = False,
) -> Prompt:
    """A conversation as tokens. Raises ApiError (400) for messages the template cannot take.

    `in_thread`: the template is a request's own, which may do as it likes.

    The template writes its own beginning-of-sequence token, so by default none is put before it; where the model
    wants one and the template leaves it out, the tokenizer adds it.
    """
    template = format.template_for(tools)
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
    num_chars += len(str(documents or "")) + len(str(tools.shown))
    tokenizer = serving.tokenizer

    def work() -> Prompt:
        plain = openai_chat.plain_messages(messages, knows_developer="developer" in template.source)
        told, shown = prepared(template, format.writes_calls, plain, tools.shown)
        try:
            text = template.render(
                told,
                tools=shown,
                add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
                continue_final_message=bool(continue_final_message),
                **variables,
            )
        except ValueError as error:
            raise errors.chat_template_failed(str(error)) from None
        with refused_text("messages"):
            token_ids = tokenizer.encode(text, True) if add_special_tokens else tokenizer.encode_chat(text)
        continued = str(told[-1].get("content") or "") if continue_final_message else None
        is_thinking = format.reasoning is not None and opened_in(format.reasoning, text, continued)
        return Prompt(token_ids, is_thinking)

    return await serving.aside(None if in_thread else num_chars, work)


def check_documents(template: ChatTemplate) -> None:
    """Raises ApiError (400) where documents would be left out without a word."""
    if "documents" not in template.source:
        message = "`documents` would have no effect: the model's chat template does not quote documents."
        raise errors.invalid_value("documents", message)
