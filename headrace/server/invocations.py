"""POST /invocations, the one address that SageMaker sends everything to: the body tells what it is."""

from __future__ import annotations

from headrace.protocol import errors
from headrace.protocol.json import Body
from headrace.server.chat import chat_completions
from headrace.server.completions import completions
from headrace.server.http import Exchange
from headrace.server.serving import Serving

_UNBUILT = {
    "input": "embeddings",
    "text_1": "scoring",
    "queries": "scoring",
    "documents": "reranking",
}


async def invocations(serving: Serving, exchange: Exchange) -> None:
    """`messages` make it a chat, `prompt` a completion. Raises ApiError (400, 501)."""
    raw = await exchange.body(serving.settings.max_body_bytes)
    names = (await serving.aside(len(raw), Body(raw).others)).keys()
    if "messages" in names:
        return await chat_completions(serving, exchange)
    if "prompt" in names:
        return await completions(serving, exchange)
    for name, feature in _UNBUILT.items():
        if name in names:
            raise errors.not_implemented("/invocations", feature)
    raise errors.missing_field("messages", "/invocations takes a chat (`messages`) or a completion (`prompt`).")
