"""What a fake upstream answers: right answers of each dialect as values, and the ways to damage them.

    chat_stream("Hel", "lo").cut(1)               one delta, then the connection closes
    messages("Hi").gzipped()                      compressed although nobody asked
    chat_stream("a", "b").one_byte_a_write()

A reply is a list of body parts, for a stream one event each, and when and how they are sent.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = Mapping[str, Any]
Framing = Literal["chunked", "length", "close"]

FOREVER_S = math.inf
EVENT_STREAM = "text/event-stream"
USAGE = (7, 3)
"""Input and output tokens that answers report unless told otherwise."""
TOOL_ARGUMENTS = '{"city": "Ulm"}'


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What one request is answered with. `parts` are pieces of the body, for a stream one event each.

    `preamble`: how many of them come before the first delta. `parts_sent` None sends all and ends the body; a number
    sends so many and then ends the connection without ending the body.
    """

    status: int = 200
    content_type: str | None = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    parts: tuple[bytes, ...] = ()
    preamble: int = 0
    framing: Framing = "length"
    head_after_s: float = 0.0
    first_part_after_s: float = 0.0
    pauses_s: float = 0.0
    """Before each further part."""
    stall_at_part: int | None = None
    """Before this part nothing more happens until the client leaves."""
    parts_sent: int | None = None
    ends_by_reset: bool = False
    silent_end: bool = False
    """Close the connection in place of any answer."""
    bytes_a_write: int | None = None
    interim_statuses: tuple[int, ...] = ()
    hang_up_on_reuse: bool = False
    """The connection stays open, but the next request on it finds it closed."""
    raw: bytes | None = None
    """Sent as it is instead of everything else."""

    @property
    def is_stream(self) -> bool:
        return self.content_type == EVENT_STREAM

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    # Faults. Each returns a new reply.

    def cut(self, after_deltas: int | None) -> Reply:
        """End the connection after so many deltas; None: right after the headers. For a whole (not streamed) body:
        half of it."""
        if not self.is_stream:
            half = len(self.body) // 2
            return dataclasses.replace(self, parts=(self.body[:half], self.body[half:]), parts_sent=1)
        return dataclasses.replace(self, parts_sent=0 if after_deltas is None else self.preamble + after_deltas)

    def cut_before_headers(self) -> Reply:
        return dataclasses.replace(self, silent_end=True)

    def by_reset(self) -> Reply:
        """The end, wherever it is, comes as a RST."""
        return dataclasses.replace(self, ends_by_reset=True)

    def stall_before_headers(self) -> Reply:
        return dataclasses.replace(self, head_after_s=FOREVER_S)

    def stall_after_headers(self) -> Reply:
        return dataclasses.replace(self, stall_at_part=0)

    def stall(self, after_deltas: int) -> Reply:
        return dataclasses.replace(self, stall_at_part=self.preamble + after_deltas)

    def slow(self, *, head_s: float = 0.0, first_part_s: float = 0.0, between_s: float = 0.0) -> Reply:
        return dataclasses.replace(self, head_after_s=head_s, first_part_after_s=first_part_s, pauses_s=between_s)

    def one_byte_a_write(self) -> Reply:
        return dataclasses.replace(self, bytes_a_write=1)

    def crlf(self) -> Reply:
        """SSE lines end with CR LF."""
        return dataclasses.replace(self, parts=tuple(part.replace(b"\n", b"\r\n") for part in self.parts))

    def gzipped(self) -> Reply:
        packed = gzip.compress(self.body)
        return dataclasses.replace(self, parts=(packed,), headers=(*self.headers, ("content-encoding", "gzip")))

    def chunked(self) -> Reply:
        return dataclasses.replace(self, framing="chunked")

    def until_close(self) -> Reply:
        """No length and no chunks: the end of the connection ends the body (HTTP/1.0 style)."""
        return dataclasses.replace(self, framing="close")

    def keep_alive_race(self) -> Reply:
        return dataclasses.replace(self, hang_up_on_reuse=True)

    def after_interim(self, *statuses: int) -> Reply:
        return dataclasses.replace(self, interim_statuses=statuses)

    def with_headers(self, **headers: str) -> Reply:
        added = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        return dataclasses.replace(self, headers=(*self.headers, *added))


# Right answers


def json_reply(value: object, status: int = 200) -> Reply:
    return Reply(status=status, parts=(json.dumps(value).encode(),))


def _data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _named(value: Json) -> bytes:
    return b"event: " + value["type"].encode() + b"\n" + _data(value)


def _stream(parts: Sequence[bytes], preamble: int) -> Reply:
    return Reply(content_type=EVENT_STREAM, framing="chunked", parts=tuple(parts), preamble=preamble)


def _openai_usage(usage: tuple[int, int]) -> Json:
    return {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}


def _tool_call(name: str, arguments: str) -> Json:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def chat(
    text: str = "Hello world",
    *,
    model: str = "fake",
    usage: tuple[int, int] | None = USAGE,
    finish: str = "stop",
    tool: str | None = None,
    arguments: str = TOOL_ARGUMENTS,
) -> Reply:
    """A chat completion; with `tool` a call of that tool."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if tool is not None:
        message |= {"content": None, "tool_calls": [_tool_call(tool, arguments)]}
        finish = "tool_calls"
    answer: dict[str, Any] = {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
    }
    if usage is not None:
        answer["usage"] = _openai_usage(usage)
    return json_reply(answer)


def chat_stream(
    *deltas: str,
    model: str = "fake",
    usage: tuple[int, int] | None = USAGE,
    finish: str = "stop",
    tool: str | None = None,
    arguments: str = TOOL_ARGUMENTS,
) -> Reply:
    """Chunks: role, the deltas, finish_reason, usage (unless None), [DONE]. With `tool` its arguments come in two."""

    def chunk(delta: Json, finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return _data({**common, "choices": [choice]})

    common = {
        "id": "chatcmpl-fake",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": model,
    }
    parts = [chunk({"role": "assistant", "content": ""})]
    parts += [chunk({"content": delta}) for delta in (deltas or ("Hello", " world"))] if tool is None else []
    if tool is not None:
        parts += [chunk({"content": delta}) for delta in deltas]
        finish = "tool_calls"
        parts.append(chunk({"tool_calls": [{"index": 0, **_tool_call(tool, "")}]}))
        for piece in (arguments[:6], arguments[6:]):
            parts.append(chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}))
    parts.append(chunk({}, finish))
    if usage is not None:
        parts.append(_data({**common, "choices": [], "usage": _openai_usage(usage)}))
    return _stream([*parts, b"data: [DONE]\n\n"], preamble=1)


def completion(text: str = "Hello world", *, model: str = "fake", usage: tuple[int, int] | None = USAGE) -> Reply:
    answer: dict[str, Any] = {
        "id": "cmpl-fake",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": model,
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}],
    }
    if usage is not None:
        answer["usage"] = _openai_usage(usage)
    return json_reply(answer)


def completion_stream(*deltas: str, model: str = "fake", usage: tuple[int, int] | None = USAGE) -> Reply:
    common = {"id": "cmpl-fake", "object": "text_completion", "created": 1_700_000_000, "model": model}

    def chunk(text: str, finish_reason: str | None = None) -> bytes:
        return _data({**common, "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})

    parts = [chunk(delta) for delta in deltas or ("Hello", " world")] + [chunk("", "stop")]
    if usage is not None:
        parts.append(_data({**common, "choices": [], "usage": _openai_usage(usage)}))
    return _stream([*parts, b"data: [DONE]\n\n"], preamble=0)


def embeddings(vectors: Sequence[Sequence[float]] = ((0.5, 0.25),), *, model: str = "fake") -> Reply:
    data = [{"object": "embedding", "index": i, "embedding": list(v)} for i, v in enumerate(vectors)]
    usage = {"prompt_tokens": USAGE[0], "total_tokens": USAGE[0]}
    return json_reply({"object": "list", "data": data, "model": model, "usage": usage})


def models(*names: str) -> Reply:
    data = [{"id": name, "object": "model", "created": 1, "owned_by": "fake"} for name in names or ("fake",)]
    return json_reply({"object": "list", "data": data})


def messages(
    text: str = "Hello world",
    *,
    model: str = "fake",
    usage: tuple[int, int] | None = USAGE,
    stop: str = "end_turn",
    tool: str | None = None,
    arguments: str = TOOL_ARGUMENTS,
) -> Reply:
    """An Anthropic message; with `tool` a tool_use block."""
    content: list[Json] = [{"type": "text", "text": text}]
    if tool is not None:
        content = [{"type": "tool_use", "id": "toolu_1", "name": tool, "input": json.loads(arguments)}]
        stop = "tool_use"
    answer: dict[str, Any] = {
        "id": "msg_fake",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
    }
    if usage is not None:
        answer["usage"] = {"input_tokens": usage[0], "output_tokens": usage[1]}
    return json_reply(answer)


def messages_stream(
    *deltas: str,
    model: str = "fake",
    usage: tuple[int, int] | None = USAGE,
    stop: str = "end_turn",
    tool: str | None = None,
    arguments: str = TOOL_ARGUMENTS,
) -> Reply:
    """message_start, content_block_start, the deltas, content_block_stop, message_delta, message_stop."""
    start: dict[str, Any] = {
        "id": "msg_fake",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }
    delta_event: dict[str, Any] = {"type": "message_delta"}
    if usage is not None:
        start["usage"] = {"input_tokens": usage[0], "output_tokens": 1}
        delta_event["usage"] = {"output_tokens": usage[1]}
    block: Json = {"type": "text", "text": ""}
    pieces: list[Json] = [{"type": "text_delta", "text": delta} for delta in deltas or ("Hello", " world")]
    if tool is not None:
        block = {"type": "tool_use", "id": "toolu_1", "name": tool, "input": {}}
        stop = "tool_use"
        pieces = [{"type": "input_json_delta", "partial_json": part} for part in (arguments[:6], arguments[6:])]
    delta_event["delta"] = {"stop_reason": stop, "stop_sequence": None}
    parts = [
        _named({"type": "message_start", "message": start}),
        _named({"type": "content_block_start", "index": 0, "content_block": block}),
        *(_named({"type": "content_block_delta", "index": 0, "delta": piece}) for piece in pieces),
        _named({"type": "content_block_stop", "index": 0}),
        _named(delta_event),
        _named({"type": "message_stop"}),
    ]
    return _stream(parts, preamble=2)


def _response_item(text: str, tool: str | None, arguments: str) -> Json:
    if tool is not None:
        call = {"id": "fc_1", "call_id": "call_1", "name": tool, "arguments": arguments, "status": "completed"}
        return {"type": "function_call", **call}
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def _response(model: str, status: str, output: Sequence[Json], usage: tuple[int, int] | None) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "id": "resp_fake",
        "object": "response",
        "created_at": 1_700_000_000,
        "model": model,
        "status": status,
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
    }
    if usage is not None:
        answer["usage"] = {
            "input_tokens": usage[0],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage[1],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sum(usage),
        }
    return answer


def responses(
    text: str = "Hello world",
    *,
    model: str = "fake",
    usage: tuple[int, int] | None = USAGE,
    tool: str | None = None,
    arguments: str = TOOL_ARGUMENTS,
) -> Reply:
    return json_reply(_response(model, "completed", [_response_item(text, tool, arguments)], usage))


def responses_stream(
    *deltas: str,
    model: str = "fake",
    usage: tuple[int, int] | None = USAGE,
    tool: str | None = None,
    arguments: str = TOOL_ARGUMENTS,
) -> Reply:
    """response.created, in_progress, item added, [part added], the deltas, the ends, response.completed."""
    pieces = deltas or ("Hello", " world")
    text = "".join(pieces)
    item = _response_item(text, tool, arguments)
    begun = {"type": "response.created", "response": _response(model, "in_progress", [], None)}
    events: list[dict[str, Any]] = [begun, {**begun, "type": "response.in_progress"}]
    where = {"item_id": item["id"], "output_index": 0}
    if tool is not None:
        empty = {**item, "arguments": "", "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": 0, "item": empty})
        pieces = (arguments[:6], arguments[6:])
        events += [{"type": "response.function_call_arguments.delta", **where, "delta": piece} for piece in pieces]
        events.append({"type": "response.function_call_arguments.done", **where, "arguments": arguments})
        preamble = 3
    else:
        where["content_index"] = 0
        part = {"type": "output_text", "text": "", "annotations": []}
        empty = {**item, "content": [], "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": 0, "item": empty})
        events.append({"type": "response.content_part.added", **where, "part": part})
        events += [{"type": "response.output_text.delta", **where, "delta": piece, "logprobs": []} for piece in pieces]
        events.append({"type": "response.output_text.done", **where, "text": text, "logprobs": []})
        events.append({"type": "response.content_part.done", **where, "part": {**part, "text": text}})
        preamble = 4
    events.append({"type": "response.output_item.done", "output_index": 0, "item": item})
    events.append({"type": "response.completed", "response": _response(model, "completed", [item], usage)})
    numbered = [{**event, "sequence_number": number} for number, event in enumerate(events)]
    return _stream([_named(event) for event in numbered], preamble)


# Wrong answers


def error(status: int, message: str = "No.", *, code: str | None = None, type: str = "upstream_says_no") -> Reply:
    """An error as OpenAI words it."""
    return json_reply({"error": {"message": message, "type": type, "param": None, "code": code}}, status)


def anthropic_error(status: int, message: str = "No.", *, type: str = "api_error") -> Reply:
    return json_reply({"type": "error", "error": {"type": type, "message": message}}, status)


def rate_limited(retry_after_s: int | None = 1, *, anthropic: bool = False) -> Reply:
    words = "Slow down."
    reply = anthropic_error(429, words, type="rate_limit_error") if anthropic else error(429, words)
    return reply if retry_after_s is None else reply.with_headers(retry_after=str(retry_after_s))


def unauthorized() -> Reply:
    return error(401, "Incorrect API key provided.", code="invalid_api_key")


def html(status: int = 502) -> Reply:
    page = f"<html><head><title>{status}</title></head><body><h1>{status} Bad Gateway</h1>nginx</body></html>"
    return Reply(status=status, content_type="text/html", parts=(page.encode(),))


def error_in_200(message: str = "The model fell over.", *, streamed: bool = False) -> Reply:
    value = {"error": {"message": message, "type": "server_error", "code": "broken"}}
    return _stream([_data(value)], preamble=0) if streamed else json_reply(value)


def empty_200() -> Reply:
    return Reply(parts=())


def invalid_json() -> Reply:
    return Reply(parts=(b'{"id": "chatcmpl-fake", "choices": [{"index": 0, "mess',))


def not_http() -> Reply:
    return Reply(raw=b"SSH-2.0-OpenSSH_9.6\r\n")
