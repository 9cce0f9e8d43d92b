"""POST /invocations, the one address that SageMaker sends everything to: the body tells what it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from headrace.protocol import errors
from headrace.protocol.json import Body
from headrace.server.chat import chat_completions
from headrace.server.completions import completions
from headrace.server.embeddings import embeddings
from headrace.server.http import Exchange
from headrace.server.rerank import rerank, score
from headrace.server.serving import Serving

Answer = Callable[[Serving, Exchange], Awaitable[None]]


async def invocations(serving: Serving, exchange: Exchange) -> None:
    """`messages` make it a chat, `prompt` a completion, `input` an embedding, `query` a ranking, `text_1` and `queries`
    a score. Raises ApiError (400)."""
    raw = await exchange.body(serving.settings.max_body_bytes)
    names = (await serving.aside(len(raw), Body(raw).others)).keys()
    for name, wanted, answer in _BY_FIELD:
        if name in names:
            serving.check_gives(wanted)
            return await answer(serving, exchange)
    raise errors.missing_field(
        "messages", "/invocations takes a chat (`messages`), a completion (`prompt`) or an embedding (`input`)."
    )


_BY_FIELD: tuple[tuple[str, Literal["text", "vectors", "scores"], Answer], ...] = (
    ("messages", "text", chat_completions),
    ("prompt", "text", completions),
    ("input", "vectors", embeddings),
    ("query", "scores", rerank),
    ("text_1", "scores", score),
    ("queries", "scores", score),
)
