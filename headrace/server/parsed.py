"""Deltas of a request's choices, read as reasoning, content and tool calls on their way to the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from headrace.protocol.answers import Delta
from headrace.server.generation import Engine
from headrace.text.answer_parser import AnswerParser, Reading


async def parsed(
    deltas: AsyncIterator[Delta], reading: Reading, engine: Engine, request_id: str, num_choices: int
) -> AsyncIterator[Delta]:
    """The deltas with their parts. A choice that may make one call, and has, is stopped in the engine."""
    parsers = [AnswerParser(reading) for _ in range(num_choices)]
    num_open = num_choices
    begun: set[int] = set()
    async with aclosing(deltas) as stream:  # type: ignore[type-var]
        async for delta in stream:
            if delta.prompt_logprobs is not None:
                yield delta
                continue
            parser = parsers[delta.index]
            if parser.is_over:
                continue
            found = parser.add(delta)
            if found is None and delta.index not in begun:
                # The client learns that the answer has begun, also while all of it is held back.
                found = Delta(delta.index, "", (), cached_tokens=delta.cached_tokens, parts=())
            begun.add(delta.index)
            if parser.is_over and delta.finish_reason is None:
                engine.abort(request_id, delta.index, "stop")
            if found is not None:
                yield found
                num_open -= found.finish_reason is not None
            if num_open == 0:
                return
