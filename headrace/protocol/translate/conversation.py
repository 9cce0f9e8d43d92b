"""A request in no dialect: turns made of parts, tools, and the wishes all dialects share.

Each dialect reads its body into a Conversation and writes one from it. What a dialect says that is not here
stays in `others` under its own name; the writer passes on what its dialect may know and reports the rest.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.protocol.translate.events import Dialect

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One of `url` (also data: URLs) and `file_id`."""

    url: str | None = None
    file_id: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One of `url` (also data: URLs), `file_id` and `text`."""

    url: str | None = None
    file_id: str | None = None
    text: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Audio:
    data: str
    format: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """What the model thought earlier. `signature` is worth something only to the dialect `signer`."""

    text: str
    signature: str | None = None
    signer: Dialect | None = None


@dataclass(frozen=True, slots=True)
class Redacted:
    """Thinking that only its maker, an upstream of dialect messages, can read."""

    data: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text; `name` the name the upstream knows the tool by."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    call_id: str
    parts: tuple[Text | Image | Document, ...]
    is_error: bool = False


Part = Text | Image | Document | Audio | Thinking | Redacted | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Turn:
    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None
    schema: Mapping[str, Any] | None
    strict: bool | None = None
    path: str = "tools"
    """Where the client's request has it."""


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """How the client knows a tool: its own name, its namespace, and whether it takes free text (`custom`)."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` with mode `named`."""

    mode: Literal["auto", "none", "required", "named"]
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """`format`: {"type": "json_schema", "name", "schema", "strict"?, "description"?} or {"type": "json_object"}.
    `thinking`: whether the client said on, off or adaptive; `effort` one of none, minimal, low, medium, high,
    xhigh, max. `dropped`: fields of the client's body that no dialect but its own has words for."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    begins_answer: bool = False
    """The last turn is the beginning of the answer, which is to go on with it."""
    tool_choice: ToolChoice | None = None
    parallel_calls: bool | None = None
    max_tokens: int | None = None
    temperature: int | float | None = None
    top_p: int | float | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    format: Mapping[str, Any] | None = None
    effort: str | None = None
    thinking: Literal["on", "off", "adaptive"] | None = None
    thinking_budget_tokens: int | None = None
    user: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    origins: Mapping[str, ToolOrigin] = field(default_factory=dict)
    """Tools whose name at the upstream is not all there is to know, by that name."""


TOOL_NAME_CHARS = 64
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


def tool_name(name: str, namespace: str | None = None) -> str:
    """A name every upstream takes: letters, digits, `_` and `-`, at most 64. Others are cut or changed and get a
    part of their hash, so that no two become one; the same name always becomes the same."""
    full = name if namespace is None else f"{namespace.rstrip('_')}__{name}"
    if len(full) <= TOOL_NAME_CHARS and not _NOT_IN_NAMES.search(full):
        return full
    digest = hashlib.sha256(full.encode()).hexdigest()[:8]
    return f"{_NOT_IN_NAMES.sub('_', full)[: TOOL_NAME_CHARS - 9]}_{digest}"


def origins_of(known: Iterable[ToolOrigin]) -> dict[str, ToolOrigin]:
    """By the upstream's name, those tools whose answers must be named back."""
    origins = {}
    for origin in known:
        name = tool_name(origin.name, origin.namespace)
        if origin.custom or name != origin.name:
            origins[name] = origin
    return origins


def merged(turns: Iterable[Turn]) -> list[Turn]:
    """Neighbouring turns of the same role as one; turns without parts are gone."""
    spoken = (turn for turn in turns if turn.parts)
    return [
        Turn(role, tuple(part for turn in together for part in turn.parts))
        for role, together in itertools.groupby(spoken, key=lambda turn: turn.role)
    ]


def current_turn(turns: Iterable[Turn]) -> int:
    """Where the model's present turn begins: after the last thing the user said (tool results are not it).
    Thinking of earlier turns has done its work; templates leave it out and strict servers refuse it."""
    start = 0
    for place, turn in enumerate(turns):
        if turn.role == "user" and any(not isinstance(part, ToolResult) for part in turn.parts):
            start = place + 1
    return start


def media_of(url: str) -> tuple[str, str] | None:
    """(media type, base64 data) of a data: URL, None for any other."""
    match = re.match(r"data:([^;,]*)(?:;[^;,]*)*;base64,", url)
    return None if match is None else (match[1] or "application/octet-stream", url[match.end() :])


def short_identity(name: str, limit_chars: int = 64) -> str:
    """A user's name as upstreams take it: a long one becomes its hash, which tells users apart as well."""
    return name if len(name) <= limit_chars else hashlib.sha256(name.encode()).hexdigest()[:limit_chars]


class Report:
    """The fields that were left out, in the order found, each once."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = dict.fromkeys(names)

    def drop(self, name: str) -> None:
        self._names[name] = None

    def drop_fields(self, fields: Mapping[str, Any]) -> None:
        """All of them, but those that say what goes without saying."""
        for name, value in fields.items():
            if value is not None and not (name in _UNSAID and _UNSAID[name] == value):
                self.drop(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)


_UNSAID: Mapping[str, object] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "store": False,
    "background": False,
    "truncation": "disabled",
    "logit_bias": {},
    "include": [],
    "service_tier": "auto",
    "min_p": 0,
}
"""Values that mean the same as the field's absence: leaving them out loses nothing."""

CHAT_ONLY = frozenset(
    "messages max_completion_tokens functions function_call n modalities audio prediction web_search_options "
    "reasoning_effort response_format verbosity logit_bias logprobs seed frequency_penalty presence_penalty".split()
)
MESSAGES_ONLY = frozenset(
    "system stop_sequences thinking output_config output_format cache_control container context_management "
    "mcp_servers inference_geo speed diagnostics betas anthropic_beta anthropic_version user_profile_id "
    "workspace_id prefill fallbacks".split()
)
RESPONSES_ONLY = frozenset(
    "input instructions max_output_tokens max_tool_calls include truncation text client_metadata context_management "
    "access_programs background background_options conversation previous_response_id prompt image moderation "
    "reasoning top_logprobs".split()
)
