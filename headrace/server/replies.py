"""Sending generated text, in whichever dialect: as one JSON answer or as a stream of events.

Both take the same deltas. While they come, the connection is watched: when the client leaves, the generation is
cancelled, which stops the request in the engine within one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from headrace.protocol import errors, sse
from headrace.protocol.answers import Delta, Usage
from headrace.protocol.errors import ApiError
from headrace.protocol.ipc import TokenLogprobs
from headrace.protocol.sampling import SamplingFields, StreamOptions
from headrace.server import http
from headrace.server.http import ClientGone, Exchange
from headrace.text.choice import joined

PING_S = 15.0
"""A stream that is silent for so long gets a sign of life: proxies and clients give up on one that is not."""

LONG_ANSWER_CHOICES = 64
"""More than that are made JSON in a thread."""


class Answer(Protocol):
    """How a dialect writes an answer."""

    def scored_prompt(self, index: int, logprobs: Sequence[TokenLogprobs]) -> None: ...

    def opening(self, index: int) -> list[dict[str, object]]: ...

    def chunks(self, delta: Delta) -> list[dict[str, object]]: ...

    def usage_chunk(self, usage: Usage) -> dict[str, object]: ...

    def whole(self, choices: Sequence[Delta], usage: Usage) -> dict[str, object]: ...


class Tally:
    """Counts tokens of an answer with `n` choices for each of the prompts."""

    def __init__(self, prompt_tokens: Sequence[int], n: int) -> None:
        self._prompt_tokens = sum(prompt_tokens)
        self._cached = [0] * len(prompt_tokens)
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._n = n

    def add(self, delta: Delta) -> None:
        self._completion_tokens += len(delta.token_ids)
        self._reasoning_tokens += delta.reasoning_tokens
        prompt = delta.index // self._n
        self._cached[prompt] = max(self._cached[prompt], delta.cached_tokens)

    def add_unseen(self, num_tokens: int) -> None:
        """Tokens that were generated and are in no answer."""
        self._completion_tokens += num_tokens

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._completion_tokens, sum(self._cached), self._reasoning_tokens)


def stream_options(fields: SamplingFields, force_usage: bool) -> StreamOptions:
    """`force_usage` has every stream tell its usage, as if asked. Raises ApiError (400) when options come without a
    stream, and for what a stream cannot bring."""
    if fields.stream and fields.prompt_logprobs is not None:
        message = "`prompt_logprobs` cannot be streamed; send `stream` false."
        raise errors.invalid_value("prompt_logprobs", message)
    options = fields.stream_options
    if options is None:
        return StreamOptions(include_usage=force_usage)
    if not fields.stream:
        raise errors.invalid_value("stream_options", "`stream_options` has an effect only with `stream` true.")
    if options.include_obfuscation:
        raise errors.unsupported_field("stream_options.include_obfuscation")
    return msgspec.structs.replace(options, include_usage=True) if force_usage else options


async def reply(
    exchange: Exchange,
    deltas: AsyncIterator[Delta],
    answer: Answer,
    tally: Tally,
    *,
    stream: bool,
    options: StreamOptions,
) -> None:
    """Answers the exchange. Raises ApiError only while nothing has been sent, ClientGone when the client left."""
    sending = _stream(exchange, deltas, answer, tally, options) if stream else _whole(exchange, deltas, answer, tally)
    await watched(exchange, sending, sse.KEEP_ALIVE)


async def watched(exchange: Exchange, sending: Coroutine[Any, Any, None], ping: bytes) -> None:
    """Do the sending while the client is there. Raises what it raises, ClientGone when the client left.

    `ping` is written into a stream that has been silent for `PING_S`, as long as it lasts.
    """
    work = asyncio.create_task(sending)
    watch = asyncio.create_task(exchange.disconnected())
    try:
        finished: set[asyncio.Task[None]] = set()
        while not finished and not exchange.is_stalled:
            patience_s = min(PING_S, http.WRITE_STALL_S)
            finished, _ = await asyncio.wait({work, watch}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not finished and exchange.is_silent(PING_S):
                await exchange.write(ping)
        if not work.done():
            raise ClientGone
        work.result()
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


async def _whole(exchange: Exchange, deltas: AsyncIterator[Delta], answer: Answer, tally: Tally) -> None:
    choices: dict[int, list[Delta]] = {}
    is_long = False
    async with aclosing(deltas) as stream:  # type: ignore[type-var]
        async for delta in stream:
            if delta.prompt_logprobs is not None:
                answer.scored_prompt(delta.index, delta.prompt_logprobs)
                is_long = True
                continue
            tally.add(delta)
            choices.setdefault(delta.index, []).append(delta)

    def written() -> bytes:
        whole = [joined(parts) for _, parts in sorted(choices.items())]
        return http.encode_json(answer.whole(whole, tally.usage))

    # What is long is written in a thread, so that nobody else's stream waits for it.
    is_long |= len(choices) > LONG_ANSWER_CHOICES
    await exchange.answer(200, await asyncio.to_thread(written) if is_long else written())


async def _stream(
    exchange: Exchange, deltas: AsyncIterator[Delta], answer: Answer, tally: Tally, options: StreamOptions
) -> None:
    opened: set[int] = set()
    async with aclosing(deltas) as stream:  # type: ignore[type-var]
        try:
            async for delta in stream:
                if delta.prompt_logprobs is not None:
                    answer.scored_prompt(delta.index, delta.prompt_logprobs)
                    continue
                tally.add(delta)
                chunks = answer.chunks(delta)
                if delta.index not in opened:
                    opened.add(delta.index)
                    chunks = answer.opening(delta.index) + chunks
                if exchange.status is None:
                    await exchange.stream(sse.HEADERS)
                await exchange.write(b"".join(_event(chunk, tally, options) for chunk in chunks))
        except ApiError as error:
            if exchange.status is None:
                raise
            await exchange.write(sse.error_event(error))
            await exchange.end()
            return
    if options.include_usage:
        await exchange.write(sse.event(answer.usage_chunk(tally.usage)))
    await exchange.write(sse.DONE)
    await exchange.end()


def _event(chunk: dict[str, Any], tally: Tally, options: StreamOptions) -> bytes:
    if options.continuous_usage_stats:
        chunk["usage"] = tally.usage.wire()
    elif options.include_usage:
        chunk["usage"] = None
    return sse.event(chunk)
