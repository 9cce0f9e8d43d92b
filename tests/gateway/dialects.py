"""The ways through the gateway, client dialect x upstream dialect, and a client that reads any of them the same way.

`ask` gives an Answer: the text, whether it ended as a whole answer ends, the error if there is one. So one test can
say of every way what must be true of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from tests.gateway import replies
from tests.gateway.replies import Reply

Client = Literal["chat", "completions", "messages", "responses"]
Upstream = Literal["openai", "anthropic"]

PROMPT = "What turns a water wheel?"
READ_TIMEOUT_S = 15.0

TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@dataclass(frozen=True)
class Way:
    """What the client speaks and what the upstream speaks."""

    client: Client
    upstream: Upstream

    def __str__(self) -> str:
        return f"{self.client}-{self.upstream}"

    @property
    def is_translated(self) -> bool:
        """Whether the dialects differ; an `openai` upstream of these tests has no /responses."""
        own: Upstream = "anthropic" if self.client == "messages" else "openai"
        return self.client == "responses" or self.upstream != own

    @property
    def path(self) -> str:
        paths: Mapping[Client, str] = {
            "chat": "/v1/chat/completions",
            "completions": "/v1/completions",
            "messages": "/v1/messages",
            "responses": "/v1/responses",
        }
        return paths[self.client]

    @property
    def model(self) -> str:
        return "fake" if self.upstream == "openai" else "claude-model"

    def body(self, *, stream: bool, tool: str | None = None, **more: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": stream}
        if self.client == "completions":
            body["prompt"] = PROMPT
        elif self.client == "responses":
            body["input"] = PROMPT
        else:
            body["messages"] = [{"role": "user", "content": PROMPT}]
        if self.client == "messages":
            body["max_tokens"] = 100
        if tool is not None:
            if self.client == "chat":
                body["tools"] = [{"type": "function", "function": {"name": tool, "parameters": TOOL}}]
            elif self.client == "messages":
                body["tools"] = [{"name": tool, "input_schema": TOOL}]
            else:
                body["tools"] = [{"type": "function", "name": tool, "parameters": TOOL}]
        return {**body, **more}

    def stream(self, *deltas: str, **more: Any) -> Reply:
        """What the upstream streams for it."""
        if self.upstream == "anthropic":
            return replies.messages_stream(*deltas, **more)
        if self.client == "completions":
            return replies.completion_stream(*deltas, **more)
        return replies.chat_stream(*deltas, **more)

    def whole(self, text: str = "Hello world", **more: Any) -> Reply:
        if self.upstream == "anthropic":
            return replies.messages(text, **more)
        return replies.completion(text, **more) if self.client == "completions" else replies.chat(text, **more)

    def reply(self, stream: bool, *deltas: str, **more: Any) -> Reply:
        return self.stream(*deltas, **more) if stream else self.whole("".join(deltas) or "Hello world", **more)


WAYS = tuple(
    Way(client, upstream)
    for upstream in ("openai", "anthropic")
    for client in ("chat", "messages", "responses", "completions")
    if not (client == "completions" and upstream == "anthropic")
)


@dataclass
class Answer:
    """What a client made of the gateway's answer."""

    status: int
    headers: Mapping[str, str]
    text: str = ""
    tool: tuple[str, str] | None = None
    """Name and arguments of the first tool call."""
    is_complete: bool = False
    """It ended as a whole answer ends: finish reason and [DONE], message_stop, response.completed."""
    error: dict[str, Any] | None = None
    usage: tuple[int, int] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    ended_early: bool = False
    """The connection broke before the HTTP body was complete."""

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]

    @property
    def code(self) -> str | None:
        return None if self.error is None else self.error.get("code")


def ask(client: httpx.Client, way: Way, *, stream: bool, **more: Any) -> Answer:
    """Send one request and read its whole answer."""
    body = way.body(stream=stream, **more)
    with client.stream("POST", way.path, json=body, timeout=READ_TIMEOUT_S) as response:
        answer = Answer(response.status_code, dict(response.headers))
        if not response.headers["content-type"].startswith("text/event-stream"):
            response.read()
            value = response.json()
            answer.events = [value]
            if response.status_code == 200:
                _whole_readers[way.client](answer, value)
            else:
                answer.error = value["error"]
            return answer
        try:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    answer.events.append({"type": "[DONE]"} if data == "[DONE]" else json.loads(data))
        except httpx.RemoteProtocolError:
            answer.ended_early = True
    for event in answer.events:
        _event_readers[way.client](answer, event)
    return answer


def _read_chat(answer: Answer, value: dict[str, Any]) -> None:
    choice = value["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    answer.text = message["content"] or ""
    calls = message.get("tool_calls")
    if calls:
        answer.tool = (calls[0]["function"]["name"], calls[0]["function"]["arguments"])
    answer.is_complete = choice["finish_reason"] in ("stop", "length", "tool_calls")
    answer.usage = _usage(value.get("usage"), "prompt_tokens", "completion_tokens")


def _read_message(answer: Answer, value: dict[str, Any]) -> None:
    assert value["type"] == "message" and value["role"] == "assistant"
    answer.text = "".join(block["text"] for block in value["content"] if block["type"] == "text")
    uses = [block for block in value["content"] if block["type"] == "tool_use"]
    if uses:
        answer.tool = (uses[0]["name"], json.dumps(uses[0]["input"]))
    answer.is_complete = value["stop_reason"] in ("end_turn", "max_tokens", "tool_use")
    answer.usage = _usage(value.get("usage"), "input_tokens", "output_tokens")


def _read_response(answer: Answer, value: dict[str, Any]) -> None:
    assert value["object"] == "response"
    for item in value["output"]:
        if item["type"] == "message":
            answer.text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            answer.tool = (item["name"], item["arguments"])
    answer.is_complete = value["status"] in ("completed", "incomplete")
    answer.usage = _usage(value.get("usage"), "input_tokens", "output_tokens")


def _chat_event(answer: Answer, event: dict[str, Any]) -> None:
    if event.get("type") == "[DONE]":
        answer.is_complete = answer.error is None
        return
    if event.get("error"):
        answer.error = event["error"]
        return
    answer.usage = _usage(event.get("usage"), "prompt_tokens", "completion_tokens") or answer.usage
    for choice in event["choices"]:
        delta = choice.get("delta") or {"content": choice.get("text")}
        answer.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            name, arguments = answer.tool or ("", "")
            function = call["function"]
            answer.tool = (name + function.get("name", ""), arguments + function.get("arguments", ""))


def _message_event(answer: Answer, event: dict[str, Any]) -> None:
    kind = event["type"]
    if kind == "error":
        answer.error = event["error"]
    elif kind == "message_start":
        answer.usage = _usage(event["message"].get("usage"), "input_tokens", "output_tokens")
    elif kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
        answer.tool = (event["content_block"]["name"], "")
    elif kind == "content_block_delta":
        delta = event["delta"]
        answer.text += delta.get("text", "")
        if delta["type"] == "input_json_delta" and answer.tool is not None:
            answer.tool = (answer.tool[0], answer.tool[1] + delta["partial_json"])
    elif kind == "message_delta" and event.get("usage"):
        started = answer.usage or (0, 0)
        answer.usage = (event["usage"].get("input_tokens") or started[0], event["usage"]["output_tokens"])
    elif kind == "message_stop":
        answer.is_complete = answer.error is None


def _response_event(answer: Answer, event: dict[str, Any]) -> None:
    kind = event["type"]
    if kind == "response.output_text.delta":
        answer.text += event["delta"]
    elif kind == "response.output_item.done" and event["item"]["type"] == "function_call":
        answer.tool = (event["item"]["name"], event["item"]["arguments"])
    elif kind == "response.failed":
        answer.error = event["response"]["error"]
    elif kind in ("response.completed", "response.incomplete"):
        answer.is_complete = answer.error is None
        answer.usage = _usage(event["response"].get("usage"), "input_tokens", "output_tokens")


def _usage(value: Any, first: str, second: str) -> tuple[int, int] | None:
    return None if not value else (value[first], value[second])


_whole_readers: Mapping[Client, Callable[[Answer, dict[str, Any]], None]] = {
    "chat": _read_chat,
    "completions": _read_chat,
    "messages": _read_message,
    "responses": _read_response,
}
_event_readers: Mapping[Client, Callable[[Answer, dict[str, Any]], None]] = {
    "chat": _chat_event,
    "completions": _chat_event,
    "messages": _message_event,
    "responses": _response_event,
}
