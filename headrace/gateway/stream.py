"""Streams of events on their way through: what is looked at, and what is changed.

Bytes go through as they came, cut at the ends of events. Only an event that carries a mark (a finish reason, usage,
an error, the end) is parsed, to know whether the answer is complete and what it cost:

    data: {"choices":[{"delta":{"content":"Hi"}}]}           passed on unread
    data: {"choices":[{"delta":{},"finish_reason":"stop"}]}  parsed: the answer is complete
    data: {"choices":[],"usage":{...}}                       parsed: billed, and left out if the client did not ask
    data: [DONE]                                             the end

A stream that ends without such an end was cut, and the client gets an error instead of a clean end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from headrace.gateway.upstream_errors import error_in
from headrace.protocol.translate.wire import count

Wire = Literal["openai", "messages", "responses"]
"""The dialect of a stream: chat and text completions, Anthropic messages, Responses."""

DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 1 << 20
"""A longer event is passed on in pieces."""

_EVENT = re.compile(rb".*?\n\r?\n", re.DOTALL)
_DATA = re.compile(rb"^data:[ ]?(.*?)\r?$", re.MULTILINE)
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

_MARKS: dict[Wire, tuple[bytes, ...]] = {
    "openai": (
        b"[DONE]",
        b'"finish_reason":"',
        b'"finish_reason": "',
        b'"usage":{',
        b'"usage": {',
        b'"error"',
    ),
    "messages": (b"message_start", b"message_delta", b"message_stop", b'"error"', b"ping"),
    "responses": (b"response.completed", b"response.incomplete", b"response.failed", b'"error"'),
}

_DELTAS: dict[Wire, bytes] = {"messages": b'"content_block_delta"', "responses": b'.delta"'}


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the upstream counted them; `input_tokens` includes the cached ones."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0


def read_usage(usage: object) -> Usage | None:
    """The usage object of any dialect, None where it is none."""
    if not isinstance(usage, dict):
        return None
    if "prompt_tokens" in usage or "completion_tokens" in usage:
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        cached = count(cached) or count(usage.get("prompt_cache_hit_tokens"))
        return Usage(count(usage.get("prompt_tokens")), count(usage.get("completion_tokens")), cached)
    if "input_tokens" not in usage and "output_tokens" not in usage:
        total = count(usage.get("total_tokens"))
        return Usage(total, 0) if total else None
    inputs, outputs = count(usage.get("input_tokens")), count(usage.get("output_tokens"))
    details = usage.get("input_tokens_details")
    if isinstance(details, dict):
        return Usage(inputs, outputs, count(details.get("cached_tokens")))
    cached = count(usage.get("cache_read_input_tokens"))
    return Usage(inputs + cached + count(usage.get("cache_creation_input_tokens")), outputs, cached)


class Framer:
    """Cuts a stream of bytes after the last complete event."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """The events that are complete now, b"" where none is."""
        seen = 0
        if self.rest:
            seen = max(0, len(self.rest) - 2)  # what was looked through already is not looked through again
            data = self.rest + data
        if data.endswith(b"\n\n"):
            self.rest = b""
            return data
        end = max(data.rfind(b"\n\n", seen) + 2, data.rfind(b"\n\r\n", seen) + 3)
        if end < 4:
            self.rest = data
            return b""
        self.rest = data[end:]
        return data[:end]


def events(block: bytes) -> Iterator[bytes]:
    """The events of a block that the framer has cut."""
    return (match[0] for match in _EVENT.finditer(block))


def data_of(event: bytes) -> bytes:
    """What the `data:` lines of an event say, b"" for a comment."""
    lines = _DATA.findall(event)
    return lines[0] if len(lines) == 1 else b"\n".join(lines)


class Watch:
    """What has been seen of one upstream stream."""

    __slots__ = (
        "_marks",
        "ended",
        "error",
        "finished",
        "invalid",
        "model",
        "num_deltas",
        "num_events",
        "response_id",
        "usage",
        "wire",
    )

    def __init__(self, wire: Wire) -> None:
        self.wire: Wire = wire
        self._marks = _MARKS[wire]
        self.usage: Usage | None = None
        self.num_deltas = 0
        """Events with a piece of the answer, about one token each."""
        self.num_events = 0
        self.finished = False
        """The upstream said why the answer ends."""
        self.ended = False
        """The dialect's last event came."""
        self.error: dict[str, Any] | None = None
        self.invalid: str | None = None
        """What an event was instead of JSON."""
        self.model: str | None = None
        """The model's name in the events."""
        self.response_id: str | None = None

    @property
    def complete(self) -> bool:
        return (self.ended or self.finished) and self.error is None

    def is_marked(self, block: bytes) -> bool:
        """Whether these events must be looked at one by one."""
        for mark in self._marks:  # noqa: SIM110 - a generator would double what a chunk costs here
            if mark in block:
                return True
        return False

    def passed(self, block: bytes) -> None:
        """Count events that are not looked at."""
        num_events = block.count(b"\ndata:") + block.startswith(b"data:")
        self.num_events += num_events
        self.num_deltas += num_events if self.wire == "openai" else block.count(_DELTAS[self.wire])

    def look(self, event: bytes) -> dict[str, Any] | None:
        """Parse one event and note what it says. None for comments, the end, and what is no object."""
        data = data_of(event)
        if not data:
            return None
        self.num_events += 1
        if data == b"[DONE]":
            self.ended = True
            return None
        try:
            value = _decode(data)
        except (msgspec.MsgspecError, RecursionError):
            self.invalid = "an event that is not JSON"
            return None
        if not isinstance(value, dict):
            self.invalid = "an event that is not a JSON object"
            return None
        error = error_in(value)
        if error:
            self.error = error
            return value
        if self.wire == "openai":
            self._look_openai(value)
        elif self.wire == "messages":
            self._look_messages(value)
        else:
            self._look_responses(value)
        return value

    def _look_openai(self, value: dict[str, Any]) -> None:
        self.usage = read_usage(value.get("usage")) or self.usage
        if self.model is None:
            self.model = _name(value.get("model"))
        for choice in choices_of(value):
            if choice.get("finish_reason"):
                self.finished = True
            if _carries(choice):
                self.num_deltas += 1

    def _look_messages(self, value: dict[str, Any]) -> None:
        kind = value.get("type")
        if kind == "content_block_delta":
            self.num_deltas += 1
        elif kind == "message_start" and isinstance(value.get("message"), dict):
            self.model = _name(value["message"].get("model"))
            self.usage = read_usage(value["message"].get("usage"))
        elif kind == "message_delta":
            later = read_usage(value.get("usage"))
            if later is not None:
                before = self.usage or Usage(0, 0)
                inputs = max(later.input_tokens, before.input_tokens)
                cached = max(later.cached_tokens, before.cached_tokens)
                self.usage = Usage(inputs, later.output_tokens, cached)
            if isinstance(value.get("delta"), dict) and value["delta"].get("stop_reason"):
                self.finished = True
        elif kind == "message_stop":
            self.ended = True

    def _look_responses(self, value: dict[str, Any]) -> None:
        kind = str(value.get("type"))
        response = value.get("response")
        if isinstance(response, dict):
            self.response_id = _name(response.get("id")) or self.response_id
            self.model = _name(response.get("model")) or self.model
        if kind.endswith(".delta"):
            self.num_deltas += 1
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            self.ended = self.finished = True
            if isinstance(response, dict):
                self.usage = read_usage(response.get("usage")) or self.usage
                if kind == "response.failed":
                    self.error = error_in({"error": response.get("error")}) or {"message": "the response failed"}

    @property
    def usage_is_final(self) -> bool:
        """False for a message stream that was cut: its first event tells the input, not yet the output."""
        return self.usage is not None and (self.wire != "messages" or self.finished)


def is_content(wire: Wire, value: Mapping[str, Any]) -> bool:
    """Whether the event carries something of the answer: text, thought, a tool call, a reason to finish."""
    if wire == "openai":
        return any(_carries(choice) or choice.get("finish_reason") for choice in choices_of(value))
    kind = str(value.get("type"))
    if wire == "messages":
        if kind == "content_block_start":
            block = value.get("content_block")
            return isinstance(block, dict) and block.get("type") not in ("text", "thinking")
        return kind in ("content_block_delta", "message_delta", "message_stop")
    return kind.endswith(".delta") or kind in ("response.output_item.done", "response.completed", "response.incomplete")


def is_usage_only(value: Mapping[str, Any]) -> bool:
    """The extra chunk of `stream_options.include_usage`."""
    return value.get("choices") == [] and isinstance(value.get("usage"), dict)


_TEXT_FIELDS = frozenset("content text reasoning_content reasoning thinking refusal arguments input".split())


def answer_text(answer: object) -> bytes:
    """All that a model wrote in a whole answer of any dialect, for an estimate of its tokens."""
    parts: list[bytes] = []

    def gather(value: object) -> None:
        if isinstance(value, list):
            for item in value:
                gather(item)
        elif isinstance(value, dict):
            for name, inner in value.items():
                if isinstance(inner, str):
                    if name in _TEXT_FIELDS:
                        parts.append(inner.encode("utf-8", "replace"))
                elif name != "usage":
                    gather(inner)

    gather(answer)
    return b" ".join(parts)


def choices_of(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of an OpenAI event that are objects."""
    choices = value.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _carries(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(value for name, value in delta.items() if name != "role")
    return bool(choice.get("text"))


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


class Renaming:
    """The model's name in an answer: the one the client asked for, in place of the one the upstream uses.

    In JSON `"model":"x"` with bare quotes can only be a field, never a part of a text.
    """

    __slots__ = ("_pairs",)

    def __init__(self, found: str, wanted: str) -> None:
        old, new = _encode(found), _encode(wanted)
        self._pairs = [(name + old, name + new) for name in (b'"model":', b'"model": ')] if old != new else []

    def apply(self, block: bytes) -> bytes:
        for old, new in self._pairs:
            block = block.replace(old, new)
        return block
