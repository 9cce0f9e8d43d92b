"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from headrace.protocol import errors
from headrace.protocol.json import Body
from headrace.protocol.openai_chat import template_variables
from headrace.protocol.token_limits import check_token_ids
from headrace.protocol.tokenization import DetokenizeFields, TokenizeFields, detokenized, tokenized
from headrace.protocol.tools import tool_request
from headrace.server.chat import prompt_of
from headrace.server.http import Exchange
from headrace.server.serving import Serving

T = TypeVar("T", bound=msgspec.Struct)


async def tokenize(serving: Serving, exchange: Exchange) -> None:
    max_model_len = serving.limits().max_model_len
    fields = await _read(serving, exchange, TokenizeFields)
    serving.names.check(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise errors.missing_field("prompt", "send either `prompt` (a text) or `messages`, and not both.")
    if fields.messages is not None:
        prompt = await prompt_of(
            serving,
            serving.chat_format(None),
            fields.messages,
            tools=tool_request(fields.tools, None, None),
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            add_special_tokens=fields.add_special_tokens,
            variables=template_variables(fields.chat_template_kwargs),
        )
        token_ids = prompt.token_ids
    else:
        (token_ids,) = await serving.encode([fields.prompt or ""], fields.add_special_tokens is not False)
    names: list[str] | None = None
    if fields.return_token_strs:
        token_text = serving.tokenizer.token_text
        names = await serving.aside(len(token_ids), lambda: [token_text(token_id) for token_id in token_ids])
    await exchange.answer_json(tokenized(token_ids, max_model_len, names))


async def detokenize(serving: Serving, exchange: Exchange) -> None:
    fields = await _read(serving, exchange, DetokenizeFields)
    serving.names.check(fields.model)
    check_token_ids("tokens", fields.tokens, serving.tokenizer.vocab_size)
    text = await serving.aside(
        len(fields.tokens), lambda: serving.tokenizer.decode(fields.tokens, skip_special_tokens=False)
    )
    await exchange.answer_json(detokenized(text))


async def _read(serving: Serving, exchange: Exchange, fields: type[T]) -> T:
    raw = await exchange.body(serving.settings.max_body_bytes)

    def parsed() -> tuple[T, list[str]]:
        body = Body(raw)
        return body.read(fields), list(body.others())

    read, unknown = await serving.aside(len(raw), parsed)
    exchange.warn_ignored(unknown)
    return read
