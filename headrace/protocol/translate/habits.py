"""What an upstream's model wants that its dialect leaves open, known from the model's name.

Names are all there is to go by before the first request; a name that is not known gets what most servers take.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from headrace.protocol.translate.messages_request import ThinkingStyle

_CLAUDE = re.compile(r"claude-(?:(?P<family>[a-z]+)-)?(?P<major>\d)(?:[-.](?P<minor>\d)(?!\d))?")
_CLAUDE_UNNUMBERED = re.compile(r"claude-(?:fable|mythos)")
_NEWER_OPENAI = re.compile(r"(?:^|/)(?:o[1-9]|gpt-[5-9])(?![a-z])")
_OLDER_OPENAI = re.compile(r"(?:^|/)(?:gpt-4|gpt-3\.5|chatgpt-4)")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamHabits:
    """`default_max_tokens`: for Anthropic upstreams, when the client set no limit. `max_tokens_field`: OpenAI's newer
    models take only `max_completion_tokens`, many other servers only `max_tokens`. `takes_effort`: False for models
    that refuse `reasoning_effort`. `thinking`: older Claudes take a budget of tokens, newer ones an effort.
    `takes_sampling`: False for Claudes that refuse temperature, top_p and top_k (4.7 and later)."""

    default_max_tokens: int = 8192
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    takes_effort: bool = True
    thinking: ThinkingStyle = "budget"
    takes_sampling: bool = True


def habits_of(model: str) -> UpstreamHabits:
    """`model`: its name at the upstream, with or without a vendor in front (`anthropic/claude-opus-4.7`)."""
    if _NEWER_OPENAI.search(model):
        return UpstreamHabits(max_tokens_field="max_completion_tokens")
    if _OLDER_OPENAI.search(model):
        return UpstreamHabits(takes_effort=False)
    version = _claude_version(model)
    if version is None:
        return UpstreamHabits()
    return UpstreamHabits(
        default_max_tokens=4096 if version < (3, 5) else 8192 if version < (4, 0) else 32_000,
        thinking="budget" if version < (4, 6) else "effort",
        takes_sampling=version < (4, 7),
    )


def _claude_version(model: str) -> tuple[int, int] | None:
    match = _CLAUDE.search(model)
    if match is not None:
        return int(match["major"]), int(match["minor"] or 0)
    return (5, 0) if _CLAUDE_UNNUMBERED.search(model) else None
