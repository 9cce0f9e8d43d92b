"""The dialect of /v1/chat/completions: its request fields, its messages, its answers whole and in chunks.

{"messages": [{"role": "user", "content": "Hi"}]}  ->  {"choices": [{"message": {"content": "Hello!"}, ...}]}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.protocol import errors
from headrace.protocol.answers import AnswerHead, AnswerPart, Content, Delta, Reasoning, ToolCall, Usage
from headrace.protocol.ipc import TokenLogprobs
from headrace.protocol.logprobs import PromptScores, chat_logprobs
from headrace.protocol.tools import plain_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEMPLATE_OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class ChatFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a chat request besides those of `SamplingFields`."""

    messages: list[dict[str, object]]
    model: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    """False leaves the thinking in the content, marks and all."""
    thinking_token_budget: int | None = None
    """Thinking longer than so many tokens is closed."""
    chat_template_kwargs: dict[str, object] | None = None
    """Variables for the model's chat template."""
    documents: list[dict[str, object]] | None = None
    """For templates that quote them, as those of RAG models do."""
    echo: bool | None = None
    chat_template: str | None = None
    """Instead of the model's own; only where the server trusts its clients with it."""


def asked_max_tokens(fields: ChatFields, max_tokens: int | None) -> tuple[int | None, str]:
    """The limit and the name of the field that set it. Raises ApiError when the two names disagree."""
    newer = fields.max_completion_tokens
    if newer is not None and max_tokens is not None and newer != max_tokens:
        raise errors.invalid_value(
            "max_completion_tokens",
            f"`max_completion_tokens` is {newer} and `max_tokens` is {max_tokens}; they mean the same, send one.",
        )
    return (newer, "max_completion_tokens") if newer is not None else (max_tokens, "max_tokens")


def asked_logprobs(fields: ChatFields, most: int) -> int | None:
    """How many alternatives to return beside each token; None for no log-probabilities."""
    top = fields.top_logprobs
    if top is not None and not 0 <= top <= most:
        raise errors.out_of_range("top_logprobs", top, f"between 0 and {most}")
    if not fields.logprobs:
        if top:
            raise errors.invalid_value("top_logprobs", "`top_logprobs` has an effect only with `logprobs` true.")
        return None
    return top or 0


def template_variables(kwargs: dict[str, object] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, checked. Raises ApiError (400) when it sets what has a field of its own."""
    variables: dict[str, Any] = dict(kwargs or {})
    for name in _TEMPLATE_OWN_NAMES:
        if name in variables:
            raise errors.invalid_value(
                f"chat_template_kwargs.{name}", f"`chat_template_kwargs` may not set `{name}`; it has its own field."
            )
    return variables


def echoed(fields: ChatFields) -> str:
    """What `echo` puts before every answer: the text of the last message. Raises ApiError (400) unless that is the
    assistant's, as the answer is."""
    last = fields.messages[-1] if fields.messages else {}
    if not fields.echo or not isinstance(last, dict):
        return ""
    if last.get("role") != "assistant":
        message = "`echo` repeats the last message where it is the assistant's, before the answer; this one is not."
        raise errors.invalid_value("echo", message)
    return _text(last.get("content"), f"messages[{len(fields.messages) - 1}].content", "assistant")


def plain_messages(messages: Sequence[dict[str, object]], *, knows_developer: bool) -> list[dict[str, object]]:
    """The messages as a template takes them: content a string, null fields gone, `developer` a system message
    unless the template knows that role. Raises ApiError (400) naming the message at fault."""
    if not messages:
        raise errors.invalid_value("messages", "`messages` is empty; send at least one message.")
    return [_plain_message(message, f"messages[{place}]", knows_developer) for place, message in enumerate(messages)]


def _plain_message(message: dict[str, object], path: str, knows_developer: bool) -> dict[str, object]:
    role = message.get("role")
    if not isinstance(role, str):
        raise errors.missing_field(f"{path}.role", f"each message needs one of the roles {', '.join(ROLES)}.")
    if role == "function" or message.get("function_call"):
        at = f"{path}.role" if role == "function" else f"{path}.function_call"
        raise errors.unsupported_field(at, "Send `tool_calls`, and results as messages with the role `tool`.")
    if role not in ROLES:
        guess = errors.nearest(role, ROLES)
        hint = f" Did you mean `{guess}`?" if guess else ""
        allowed = ", ".join(ROLES)
        raise errors.invalid_value(f"{path}.role", f"`{path}.role` is {errors.quoted(role)}; use {allowed}.{hint}")
    plain = {name: value for name, value in message.items() if value is not None}
    plain["role"] = "system" if role == "developer" and not knows_developer else role
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise errors.missing_field(f"{path}.tool_call_id", "a tool's result names the call that it answers.")
    plain["content"] = _text(message.get("content"), f"{path}.content", role)
    if role == "assistant":
        if message.get("tool_calls"):
            plain["tool_calls"] = plain_calls(message["tool_calls"], f"{path}.tool_calls")
            plain["content"] = plain["content"] or None
        else:
            plain.pop("tool_calls", None)
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str):
            plain["reasoning_content"] = plain["reasoning"] = thought
    return plain


def _text(content: object, path: str, role: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part, f"{path}[{place}]") for place, part in enumerate(content))
    if content is None and role == "assistant":
        return ""
    found = "missing or null" if content is None else f"{errors.quoted(content)}"
    raise errors.invalid_value(path, f"`{path}` must be a string or a list of text parts, but it is {found}.")


def _part_text(part: object, path: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise errors.invalid_value(path, f'`{path}` must be an object such as {{"type": "text", "text": "..."}}.')
    if part["type"] not in ("text", "input_text", "output_text"):
        feature = f"Content of type {errors.quoted(part['type'])} needs a model that takes it; this one takes text."
        raise errors.unsupported_field(path, feature)
    if not isinstance(part.get("text"), str):
        raise errors.invalid_value(f"{path}.text", f"`{path}.text` must be a string.")
    return str(part["text"])


class ChatAnswer:
    """Builds the answer to one chat request from deltas."""

    def __init__(
        self,
        head: AnswerHead,
        *,
        with_logprobs: bool,
        with_token_ids: bool,
        prompt_ids: list[int],
        scores: PromptScores | None = None,
    ) -> None:
        self._head = head
        self._scores = scores
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._prompt_ids = prompt_ids

    def scored_prompt(self, index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """The log-probabilities of the prompt's tokens but the first."""
        if self._scores is not None:
            self._scores.take(logprobs)

    def opening(self, index: int) -> list[dict[str, object]]:
        """The chunk that begins a choice: the role and no text."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._chunk([choice])
        if self._with_token_ids:
            chunk["prompt_token_ids"] = self._prompt_ids
        return [chunk]

    def chunks(self, delta: Delta) -> list[dict[str, object]]:
        told = [] if delta.parts is None else [told for part in delta.parts for told in _told(part)]
        if delta.parts is None and (delta.text or delta.token_ids):
            told = [{"content": delta.text}]
        elif not told and delta.token_ids and (self._with_logprobs or self._with_token_ids):
            told = [{"content": ""}]
        chunks = []
        for place, one in enumerate(told):
            choice: dict[str, object] = {"index": delta.index, "delta": one}
            tokens = delta.tokens if place == 0 else ()
            choice["logprobs"] = chat_logprobs(tokens or ()) if self._with_logprobs else None
            choice["finish_reason"] = None
            if self._with_token_ids:
                choice["token_ids"] = delta.token_ids if place == 0 else []
            chunks.append(self._chunk([choice]))
        if delta.finish_reason is not None:
            choice = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason}
            choice["stop_reason"] = delta.stop_reason
            chunks.append(self._chunk([choice]))
        return chunks

    def usage_chunk(self, usage: Usage) -> dict[str, object]:
        return {**self._chunk([]), "usage": usage.wire()}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> dict[str, object]:
        """`choices`: each choice's deltas joined into one."""
        answer = self._start("chat.completion")
        answer["choices"] = [self._choice(choice) for choice in choices]
        answer["usage"] = usage.wire()
        if self._with_token_ids:
            answer["prompt_token_ids"] = self._prompt_ids
        if self._scores is not None:
            answer["prompt_logprobs"] = self._scores.listed()
        return answer

    def _choice(self, choice: Delta) -> dict[str, object]:
        wire: dict[str, object] = {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": chat_logprobs(choice.tokens or ()) if self._with_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._with_token_ids:
            wire["token_ids"] = choice.token_ids
        return wire

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        chunk = self._start("chat.completion.chunk")
        chunk["choices"] = choices
        return chunk

    def _start(self, object_name: str) -> dict[str, object]:
        head = self._head
        return {
            "id": head.id,
            "object": object_name,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }


def _told(part: AnswerPart) -> list[dict[str, object]]:
    """A part of a choice as the deltas of its chunks."""
    match part:
        case Content():
            return [{"content": part.text}]
        case Reasoning():
            return [{"reasoning": part.text, "reasoning_content": part.text}]
        case ToolCall():
            function = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": part.id, "type": "function", "function": function}
            arguments = {"index": part.index, "function": {"arguments": part.arguments}}
            return [{"tool_calls": [call]}, {"tool_calls": [arguments]}]


def _message(choice: Delta) -> dict[str, object]:
    if choice.parts is None:
        return {"role": "assistant", "content": choice.text, "refusal": None}
    content = "".join(part.text for part in choice.parts if isinstance(part, Content))
    thought = "".join(part.text for part in choice.parts if isinstance(part, Reasoning))
    calls = [part for part in choice.parts if isinstance(part, ToolCall)]
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if thought:
        message |= {"reasoning": thought, "reasoning_content": thought}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message
