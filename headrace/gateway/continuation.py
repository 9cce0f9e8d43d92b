"""Going on with a streamed answer whose upstream broke off in the middle, where the configuration asks for it.

    first upstream   "A head"  "race is"  ✗        the text so far becomes the last message of a second request,
    second upstream                       " a channel."    whose answer goes on where the first stopped

Once, and for plain text only: a tool call, a grammar or a thought cannot be gone on with from its text. The second
upstream must speak the same dialect and know `continue_final_message`, as vLLM and Headrace do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.gateway.body import Fields
from headrace.gateway.error_forms import comment
from headrace.gateway.request import Call, Request
from headrace.gateway.route import Attempt
from headrace.gateway.stream import choices_of, data_of, events
from headrace.protocol.translate.translator import StreamTranslator

MAX_SAID_BYTES = 8 << 20
"""Of an answer's events that are kept, and so of what a second request can hold."""
LIMITS = ("max_tokens", "max_completion_tokens")
FORMATS = frozenset(
    "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar suffix echo".split()
)
"""Fields with which a text that goes on is another text than one that begins."""
_PLAIN = frozenset({"role", "content"})

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Said:
    """What an upstream had said before it broke, as the client has it."""

    text: str
    names: dict[str, Any]
    """`id`, `created` and `model` of its chunks."""
    num_tokens: int
    translator: StreamTranslator | None
    """Has said the same in the client's dialect."""


def may_continue(request: Request) -> bool:
    """Whether the events of a stream are worth keeping: it may be gone on with if it breaks."""
    fields = request.fields
    if fields is None or request.facts.num_tools or request.facts.num_answers > 1:
        return False
    return not any(name in FORMATS for name in fields.raws) and request.endpoint.name in (
        "chat",
        "completions",
        "messages",
        "responses",
    )


class Record:
    """The events of an OpenAI stream that have reached the client, kept to be gone on with."""

    __slots__ = ("_blocks", "_size")

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._size = 0

    def add(self, block: bytes) -> None:
        self._size += len(block)
        if self._size <= MAX_SAID_BYTES:
            self._blocks.append(block)

    def said(self, model: str | None, num_tokens: int, translator: StreamTranslator | None) -> Said | None:
        """None where it is more than text, or too much, or nothing. `model`: the name shown, where it is another."""
        if self._size > MAX_SAID_BYTES:
            return None
        text: list[str] = []
        names: dict[str, Any] = {}
        for event in events(b"".join(self._blocks)):
            data = data_of(event)
            if not data:
                continue
            value = _decode(data)
            names = names or {name: value[name] for name in ("id", "created", "model") if name in value}
            for choice in choices_of(value):
                delta = choice.get("delta")
                if not isinstance(delta, dict):
                    text.append(choice.get("text") or "")
                elif any(delta[name] for name in delta.keys() - _PLAIN):
                    return None
                else:
                    text.append(delta.get("content") or "")
        if model is not None and "model" in names:
            names["model"] = model
        whole = "".join(text)
        return Said(whole, names, num_tokens, translator) if whole else None


def takes_over(attempt: Attempt) -> bool:
    """Whether this upstream can be asked to go on with somebody's text."""
    return attempt.upstream.dialect == "openai" and attempt.upstream.extended_sampling


def continued(call: Call, before: Said) -> Call | None:
    """The request for the rest of the answer; None where it cannot be put."""
    fields = Fields(call.body)
    if call.path == "/chat/completions":
        messages = fields.value("messages")
        if not isinstance(messages, list) or not messages:
            return None
        text = before.text
        if fields.value("continue_final_message"):  # the client's own request to go on with a text
            last = messages.pop()
            if not isinstance(last, dict) or not isinstance(last.get("content"), str):
                return None
            text = last["content"] + text
        changes: dict[str, Any] = {
            "messages": [*messages, {"role": "assistant", "content": text}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
    elif call.path == "/completions" and isinstance(fields.value("prompt"), str):
        changes = {"prompt": fields.value("prompt") + before.text}
    else:
        return None
    for name in LIMITS:
        limit = fields.value(name)
        if isinstance(limit, int):
            if limit <= before.num_tokens:
                return None
            changes[name] = limit - before.num_tokens
    return msgspec.structs.replace(call, body=fields.changed(changes))


def mark(upstream: str, cause: str) -> bytes:
    """A comment in the stream, at the place where another goes on. `cause`: upstream:code of what broke."""
    return comment(f"continued by {upstream} after {cause}")


def as_one(value: dict[str, Any], before: Said) -> bytes:
    """An event of the second answer as one of the first: its names, its usage, and no second beginning."""
    usage = value.get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
        value = {**value, "usage": _joined(usage, before.num_tokens)}
    for choice in choices_of(value):
        if isinstance(choice.get("delta"), dict):
            choice["delta"].pop("role", None)
    return b"data: " + _encode({**value, **before.names}) + b"\n\n"


def _joined(usage: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """What the first said is a part of the second's prompt, and of the answer that the client has."""
    moved = min(num_tokens, usage["prompt_tokens"])
    completion = usage.get("completion_tokens")
    completion = completion if isinstance(completion, int) else 0
    return {**usage, "prompt_tokens": usage["prompt_tokens"] - moved, "completion_tokens": completion + moved}
