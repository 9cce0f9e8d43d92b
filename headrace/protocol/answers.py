"""What both OpenAI dialects share in their answers: usage, and the values a generated choice is made of."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headrace.protocol.ipc import TokenLogprobs
from headrace.protocol.logprobs import ScoredToken


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    """Of the completion's tokens those of the thinking before the answer."""

    def wire(self) -> dict[str, object]:
        wire: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens:
            wire["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return wire


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields every chunk and every whole answer of one request begin with. `created` in Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is the text of a JSON object. `index` counts the calls of a choice."""

    index: int
    id: str
    name: str
    arguments: str


AnswerPart = Content | Reasoning | ToolCall


class Delta(msgspec.Struct, frozen=True):
    """What a choice gained: usually one token and its text. The text is whole characters, free of stop strings.

    `finish_reason` comes with the last one. `stop_reason` is the stop string or the id from `stop_token_ids` that
    ended the choice; None when the model ended it. `tokens` are scored only when log-probabilities were asked.
    `cached_tokens`: prompt tokens that came from the prefix cache, set with a choice's first delta.
    `parts` are what the text was found to be; None where it was not looked at, and all of it is content. Text of parts
    that are not told, such as marks, is in no part.
    A delta with `prompt_logprobs` has nothing else: it tells those of all the prompt's tokens but the first.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[ScoredToken, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    parts: tuple[AnswerPart, ...] | None = None
    reasoning_tokens: int = 0
