"""POST /v1/embeddings, and /pooling, which gives the same in vLLM's words, and rows and scores besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from headrace.protocol import errors
from headrace.protocol.ipc import PoolingParams
from headrace.protocol.pooling import (
    EmbeddingFields,
    PoolFields,
    embedding_params,
    listing,
    texts,
    written,
    written_rows,
)
from headrace.server.http import Exchange, encode_json
from headrace.server.pooling import Input, pooled, pooler_of, read_fields, read_texts
from headrace.server.replies import watched
from headrace.server.serving import Serving

MOST_NUMBERS = 1 << 23
"""In an answer with the rows of all tokens: 32 MiB of float32, several times that as JSON."""


async def embeddings(serving: Serving, exchange: Exchange) -> None:
    fields = await read_fields(serving, exchange, EmbeddingFields)
    await _answer(serving, exchange, fields, _params(serving, fields, "embed"), "embedding")


async def pooling(serving: Serving, exchange: Exchange) -> None:
    fields = await read_fields(serving, exchange, PoolFields)
    pooler = pooler_of(serving)
    task = fields.task or pooler.task
    if (task == "score") != (pooler.task == "score"):
        known = "score" if pooler.task == "score" else "embed or token_embed"
        raise errors.out_of_range("task", task, f"{known} for this model")
    if task == "score":
        params = PoolingParams(task="score", every_row=False, activation=pooler.activation)
    else:
        params = _params(serving, fields, task)
    await _answer(serving, exchange, fields, params, "pooling")


async def _answer(
    serving: Serving, exchange: Exchange, fields: EmbeddingFields, params: PoolingParams, kind: str
) -> None:
    given = texts(fields.input, "input")
    inputs = await read_texts(
        serving, fields, given, params, "input", add_special_tokens=fields.add_special_tokens is not False
    )
    if params.task == "token_embed":
        _check_rows(serving, inputs)
    head = serving.head("embd" if kind == "embedding" else "pool")

    async def send() -> None:
        results = await pooled(serving, exchange, head, fields, inputs)

        def body() -> bytes:
            name = "embedding" if kind == "embedding" else "data"
            values: list[object] = [
                written_rows(raw, len(i.token_ids), fields.encoding_format)
                if params.task == "token_embed"
                else written(raw, fields.encoding_format)
                for raw, i in zip(results, inputs, strict=True)
            ]
            num_tokens = sum(len(i.token_ids) for i in inputs)
            return encode_json(listing(head, kind, [(name, value) for value in values], num_tokens))

        await exchange.answer(200, await serving.aside(sum(map(len, results)), body))

    with serving.generating():
        await watched(exchange, send(), b"")


def _check_rows(serving: Serving, inputs: Sequence[Input]) -> None:
    """Raises ApiError (400) for more rows than an answer may hold."""
    num_tokens, width = sum(len(i.token_ids) for i in inputs), serving.ready_info().vector_width
    if num_tokens * width > MOST_NUMBERS:
        message = (
            f"`input` has {num_tokens} tokens, and an answer holds the rows of {MOST_NUMBERS // width} at most (of "
            f"{width} numbers each). Send fewer texts at a time."
        )
        raise errors.invalid_value("input", message)


def _params(serving: Serving, fields: EmbeddingFields, task: Literal["embed", "token_embed"]) -> PoolingParams:
    return embedding_params(pooler_of(serving), fields, task, serving.ready_info().vector_width)
