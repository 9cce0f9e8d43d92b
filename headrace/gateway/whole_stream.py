"""A whole answer as the stream that was asked for: some servers stream not every model, or not with tools.

An OpenAI answer becomes a chunk that says everything, a chunk that ends it, and usage where the client asked for it;
what else stands in the answer stays in its place. The two other dialects have a translator from each to itself.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from headrace.gateway.request import Request
from headrace.gateway.stream import DONE
from headrace.protocol.translate.events import Dialect
from headrace.protocol.translate.exchange import Exchange
from headrace.protocol.translate.translator import StreamTranslator

_encode = msgspec.json.Encoder().encode


def openai_stream(answer: dict[str, Any], model: str, *, wants_usage: bool) -> bytes:
    """`answer`: a chat or text completion, whose choices are a list. `model`: the name that the client reads."""
    usage = answer.pop("usage", None)
    chunk = {**answer, "model": model}
    if answer.get("object") == "chat.completion":
        chunk["object"] = "chat.completion.chunk"
    choices = [choice for choice in answer["choices"] if isinstance(choice, dict)]
    said = {**chunk, "choices": [_said(choice) for choice in choices]}
    ended = {**chunk, "choices": [_ended(choice) for choice in choices]}
    sent = [said, ended, *([{**chunk, "choices": [], "usage": usage}] if wants_usage and usage is not None else [])]
    return b"".join([b"data: " + _encode(event) + b"\n\n" for event in sent]) + DONE


def self_translator(request: Request, dialect: Dialect, model: str) -> StreamTranslator:
    return StreamTranslator(
        Exchange(
            client=dialect,
            upstream=dialect,
            model=model,
            request_id=request.request_id.decode("latin-1"),
            created_s=int(time.time()),
            stream=True,
            prompt_tokens=request.facts.prompt_tokens,
        )
    )


def _said(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    if not isinstance(message, dict):
        return {**choice, "finish_reason": None}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        numbered = [{"index": n, **call} for n, call in enumerate(calls) if isinstance(call, dict)]
        message = {**message, "tool_calls": numbered}
    rest = {name: value for name, value in choice.items() if name != "message"}
    return {**rest, "delta": message, "finish_reason": None}


def _ended(choice: dict[str, Any]) -> dict[str, Any]:
    nothing: dict[str, Any] = {"delta": {}} if isinstance(choice.get("message"), dict) else {"text": ""}
    return {"index": choice.get("index", 0), **nothing, "finish_reason": choice.get("finish_reason") or "stop"}
