"""Requests of models that give vectors and scores: their texts read, cut and checked, and computed together.

Every text is a request of its own to the engine, which batches them as it likes. One that cannot be computed is known,
and named by its place, before any is sent. A request for thousands of texts has as many with the engine as two steps
read, so that it neither fills the queue nor keeps others waiting behind all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from headrace.config.pooling import Pooler
from headrace.protocol import errors
from headrace.protocol.answers import AnswerHead
from headrace.protocol.ipc import PoolingParams, SamplingParams
from headrace.protocol.json import Body
from headrace.protocol.pooling import PoolingFields, Text, cosines, floats
from headrace.protocol.sampling import SamplingFields
from headrace.protocol.token_limits import check_token_ids
from headrace.protocol.unbuilt_fields import unknown_fields
from headrace.server.http import Exchange
from headrace.server.requests import log_request
from headrace.server.serving import Serving, refused_text

STEPS_AHEAD = 2
"""As much of one request as so many steps read is with the engine: the one computed, and what the next begins with."""

T = TypeVar("T", bound=PoolingFields)


class Input(msgspec.Struct, frozen=True):
    """A text ready for the engine."""

    token_ids: list[int]
    params: PoolingParams


async def read_fields(serving: Serving, exchange: Exchange, dialect: type[T]) -> T:
    """The body's fields. Raises ApiError (400); names unknown ones in a header."""
    raw = await exchange.body(serving.settings.max_body_bytes)

    def parsed() -> tuple[T, dict[str, object]]:
        body = Body(raw)
        return body.read(dialect), body.others()

    fields, others = await serving.aside(len(raw), parsed)
    exchange.name(fields.request_id)
    exchange.warn_ignored(unknown_fields(others))
    serving.names.check(fields.model)
    return fields


def pooler_of(serving: Serving) -> Pooler:
    """Of a server whose routes have been checked (app.py): the model pools."""
    pooler = serving.engine_settings.pooler
    assert pooler is not None
    return pooler


async def read_texts(
    serving: Serving,
    fields: PoolingFields,
    given: Sequence[Text],
    params: PoolingParams,
    param: str,
    *,
    add_special_tokens: bool = True,
) -> list[Input]:
    """Token ids of every text. Raises ApiError (400) naming the one that is at fault."""
    limit, whole = length_limit(serving, fields), serving.ready_info().max_model_len
    side = fields.truncation_side or "right"
    tokenizer, vocab_size = serving.tokenizer, serving.limits().vocab_size

    def ids_of(text: Text, where: str) -> list[int]:
        if not isinstance(text, str):
            check_token_ids(where, text, vocab_size)
            return text if limit is None else text[:limit] if side == "right" else text[-limit:]
        with refused_text(where):
            if limit is not None and add_special_tokens:
                return tokenizer.encode_within(text, limit, side)
            ids = tokenizer.encode(text, add_special_tokens)
            return ids if limit is None else ids[:limit] if side == "right" else ids[-limit:]

    def work() -> list[Input]:
        read = []
        for place, text in enumerate(given):
            where = f"{param}[{place}]" if len(given) > 1 else param
            read.append(Input(checked(ids_of(text, where), whole, where), params))
        return read

    return await serving.aside(sum(map(len, given)), work)


async def read_pairs(
    serving: Serving,
    fields: PoolingFields,
    first: Sequence[str],
    second: Sequence[str],
    params: PoolingParams,
    name: str,
) -> list[Input]:
    """Each pair as one text of a cross-encoder; a lone first text goes with every second one, whose field is `name`.

    Raises ApiError (400) naming the second text of the pair that is at fault.
    """
    limit, whole = length_limit(serving, fields), serving.ready_info().max_model_len

    def work() -> list[Input]:
        read = []
        for place, two in enumerate(second):
            where = f"{name}[{place}]" if len(second) > 1 else name
            with refused_text(where):
                ids, second_at = serving.tokenizer.encode_pair(first[place % len(first)], two, limit)
            read.append(Input(checked(ids, whole, where), msgspec.structs.replace(params, second_text_at=second_at)))
        return read

    return await serving.aside(sum(map(len, first)) + sum(map(len, second)), work)


def length_limit(serving: Serving, fields: PoolingFields) -> int | None:
    """`truncate_prompt_tokens`, of which -1 is what the model reads. Raises ApiError (400)."""
    asked, longest = fields.truncate_prompt_tokens, serving.ready_info().max_model_len
    if asked is None:
        return None
    if asked != -1 and not 1 <= asked <= longest:
        raise errors.out_of_range("truncate_prompt_tokens", asked, f"-1 (what fits), or between 1 and {longest}")
    return longest if asked == -1 else asked


def checked(token_ids: list[int], longest: int, where: str) -> list[int]:
    """Raises ApiError (400) for a text that the model cannot read whole, and one without a token."""
    if not token_ids:
        raise errors.invalid_value(where, f"`{where}` is empty; there is nothing to read.")
    if len(token_ids) > longest:
        raise errors.text_too_long(where, len(token_ids), longest)
    return token_ids


async def pooled(
    serving: Serving, exchange: Exchange, head: AnswerHead, fields: PoolingFields, inputs: Sequence[Input]
) -> list[bytes]:
    """What the engine makes of each. Raises ApiError; the others are then stopped, as when the reader leaves."""
    priority = serving.priority(exchange, SamplingFields(priority=fields.priority))
    most_tokens = STEPS_AHEAD * serving.ready_info().max_num_batched_tokens
    exchange.answer_id = head.id

    async def one(number: int, item: Input) -> bytes:
        params = SamplingParams(max_tokens=1, pooling=item.params)
        if number == 0:
            log_request(serving, exchange, head.id, sum(len(i.token_ids) for i in inputs), params)
        outputs = serving.client.generate(
            f"{head.id}-{number}",
            item.token_ids,
            params,
            priority=priority,
            cache_salt=fields.cache_salt,
            streamed=False,
            group=group,
        )
        async with aclosing(outputs) as stream:  # type: ignore[type-var]
            async for output in stream:
                if output.pooled is not None:
                    return output.pooled
        raise errors.engine_error("The engine ended this request without finishing it.")

    results = [b""] * len(inputs)
    in_work: dict[asyncio.Task[bytes], int] = {}

    async def make_room(num_tokens: int) -> None:
        """Until so many tokens more are no more than the engine shall have, or it has none."""
        while in_work and num_tokens + sum(len(inputs[n].token_ids) for n in in_work.values()) > most_tokens:
            done, _ = await asyncio.wait(in_work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                results[in_work.pop(task)] = task.result()

    # One place and the tokens of two steps: more is never with the engine.
    num_tokens = min(most_tokens, sum(len(item.token_ids) for item in inputs))
    with serving.client.let_in(1, num_tokens, priority=priority) as group:
        try:
            for number, item in enumerate(inputs):
                await make_room(len(item.token_ids))
                in_work[asyncio.create_task(one(number, item))] = number
            await make_room(most_tokens + 1)
        finally:
            for task in in_work:
                task.cancel()
            await asyncio.gather(*in_work, return_exceptions=True)
    return results


async def pair_scores(
    serving: Serving,
    exchange: Exchange,
    head: AnswerHead,
    fields: PoolingFields,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
) -> tuple[list[float], int]:
    """A score for each pair, and how many tokens were read. A cross-encoder reads the pair; of a model that gives
    vectors it is the cosine of the two. A lone first text goes with every second one; `names` are the texts' fields."""
    pooler = pooler_of(serving)
    if pooler.task == "score":
        asked = PoolingParams(task="score", every_row=False, activation=pooler.activation)
        inputs = await read_pairs(serving, fields, first, second, asked, names[1])
        results = await pooled(serving, exchange, head, fields, inputs)
        return [floats(raw)[0] for raw in results], sum(len(i.token_ids) for i in inputs)
    vector = PoolingParams(task="embed", every_row=pooler.pooling == "mean", normalize=True)
    inputs = [
        *await read_texts(serving, fields, first, vector, names[0]),
        *await read_texts(serving, fields, second, vector, names[1]),
    ]
    results = await pooled(serving, exchange, head, fields, inputs)

    def scores() -> list[float]:
        vectors = [floats(raw) for raw in results]
        return cosines(vectors[: len(first)], vectors[len(first) :])

    return await serving.aside(sum(map(len, results)), scores), sum(len(i.token_ids) for i in inputs)
