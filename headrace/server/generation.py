"""Requests to the engine and their choices' text as it comes back, chat or completion, streamed or not.

engine ──► tokens ──► Choice (headrace/text/choice.py) ──► Delta
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.protocol import errors
from headrace.protocol.answers import Delta
from headrace.protocol.ipc import FinishReason, SamplingParams, SequenceOutput, TokenLogprobs
from headrace.protocol.sampling import TextRules
from headrace.server.room import Group
from headrace.text.choice import Choice
from headrace.text.tokenizer import Tokenizer


class Engine(Protocol):
    """The part of `EngineClient` that generation needs."""

    def let_in(self, num_sequences: int, num_tokens: int, *, priority: int = 0) -> AbstractContextManager[Group]: ...

    def generate(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        streamed: bool = True,
        group: Group | None = None,
    ) -> AsyncIterator[SequenceOutput]: ...

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = "abort") -> None: ...


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue `params.n` times.

    `stop_token_ids` are those the client named; ending on one of them is reported as the stop reason, ending on
    the model's own end-of-sequence token is not.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    rules: TextRules
    stop_token_ids: frozenset[int] = frozenset()
    ids_as_tokens: bool = False
    priority: int = 0
    cache_salt: str | None = None
    streamed: bool = True
    """Deltas are sent as they come; else only when all are there, so the engine may begin again after a failure."""


async def generate(
    engine: Engine, tokenizer: Tokenizer, request: GenerationRequest, group: Group | None = None
) -> AsyncIterator[Delta]:
    """The deltas of all choices as they come. Closing the iterator stops the request in the engine.

    Raises ApiError when the engine refuses the request, fails on it, or dies.
    """
    params = request.params
    choices = [
        Choice(
            index,
            tokenizer,
            params,
            request.rules,
            stop_token_ids=request.stop_token_ids,
            ids_as_tokens=request.ids_as_tokens,
        )
        for index in range(params.n)
    ]
    num_open = params.n
    prompt_logprobs: list[TokenLogprobs] = []
    outputs = engine.generate(
        request.request_id,
        request.token_ids,
        params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        streamed=request.streamed,
        group=group,
    )
    async with aclosing(outputs) as stream:  # type: ignore[type-var]
        async for output in stream:
            choice = choices[output.index]
            if choice.finished:
                continue
            if output.finish_reason == "error":
                raise errors.failed(output.error_code, output.error)
            if output.prompt_logprobs:
                prompt_logprobs += output.prompt_logprobs
                if len(prompt_logprobs) == len(request.token_ids) - 1:
                    yield Delta(output.index, "", (), prompt_logprobs=tuple(prompt_logprobs))
            for delta in choice.add(output):
                yield delta
            if choice.finished:
                if output.finish_reason is None:
                    engine.abort(request.request_id, output.index, "stop")
                num_open -= 1
                if num_open == 0:
                    return
    raise errors.engine_error("The engine ended this request without finishing it.")


async def generate_all(
    engine: Engine, tokenizer: Tokenizer, requests: Sequence[GenerationRequest]
) -> AsyncIterator[Delta]:
    """Several prompts; choice j of prompt i has index i * n + j. One that fails ends them all.

    They go to the engine a few at a time (see `Group`), so that other requests get their turn between them.
    """
    if len(requests) == 1:
        async with aclosing(generate(engine, tokenizer, requests[0])) as stream:  # type: ignore[type-var]
            async for delta in stream:
                yield delta
        return
    params, num_tokens = requests[0].params, sum(len(request.token_ids) for request in requests)
    with engine.let_in(len(requests) * params.n, num_tokens, priority=requests[0].priority) as group:
        async with aclosing(_in_turn(engine, tokenizer, requests, group)) as stream:  # type: ignore[type-var]
            async for delta in stream:
                yield delta


async def _in_turn(
    engine: Engine, tokenizer: Tokenizer, requests: Sequence[GenerationRequest], group: Group
) -> AsyncIterator[Delta]:
    n = requests[0].params.n
    places = asyncio.Semaphore(max(1, group.most_open // n))
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=len(requests))
    pumps: set[asyncio.Task[None]] = set()

    async def pump(number: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(generate(engine, tokenizer, request, group)) as stream:  # type: ignore[type-var]
                async for delta in stream:
                    await queue.put(_renumbered(delta, number * n))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)
        finally:
            places.release()

    async def send() -> None:
        for number, request in enumerate(requests):
            await places.acquire()
            task = asyncio.create_task(pump(number, request))
            pumps.add(task)
            task.add_done_callback(pumps.discard)
            await asyncio.sleep(0)  # a thousand at once would hold up everybody else's tokens

    sender = asyncio.create_task(send())
    try:
        num_open = len(requests)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        tasks = [sender, *pumps]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _renumbered(delta: Delta, first_index: int) -> Delta:
    return msgspec.structs.replace(delta, index=first_index + delta.index)
