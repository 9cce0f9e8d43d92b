"""What an answer must know of its request, and the events a client is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.protocol.translate.conversation import ToolOrigin
from headrace.protocol.translate.events import Begin, Dialect, Usage

_encode = msgspec.json.Encoder().encode
_PREFIX = re.compile(r"^(chatcmpl|cmpl|msg|resp|gen)[-_]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """`client` and `upstream`: the dialects. `model`: the name the client asked for, which the answer carries.
    `created_s`: when the request came, Unix seconds. `prompt_tokens`: an estimate, used until the upstream counts.
    `wants_usage`: a chat client asked for the usage chunk. `echo`: fields a responses client gets back."""

    client: Dialect
    upstream: Dialect
    model: str
    request_id: str
    created_s: int
    stream: bool = False
    wants_usage: bool = False
    prompt_tokens: int = 0
    origins: Mapping[str, ToolOrigin] = field(default_factory=dict)
    echo: Mapping[str, Any] = field(default_factory=dict)

    def origin(self, name: str) -> ToolOrigin:
        """How the client knows the tool that the upstream calls `name`."""
        return self.origins.get(name) or ToolOrigin(name)

    def id(self, begin: Begin, prefix: str) -> str:
        """The answer's id in the client's dialect: the upstream's with another prefix."""
        return f"{prefix}{_PREFIX.sub('', begin.id)}"

    def created(self, begin: Begin) -> int:
        return begin.created_s if begin.created_s is not None else self.created_s


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One event of the client's stream. `name`: its `event:` line; `data` None: chat's `[DONE]`."""

    data: Mapping[str, Any] | None
    name: str | None = None

    def encode(self) -> bytes:
        if self.data is None:
            return b"data: [DONE]\n\n"
        line = b"" if self.name is None else b"event: " + self.name.encode() + b"\n"
        return line + b"data: " + _encode(self.data) + b"\n\n"


DONE = Outgoing(None)


def typed(data: Mapping[str, Any]) -> Outgoing:
    """An event whose `event:` line repeats its type, as Anthropic's and responses' do."""
    return Outgoing(data, str(data["type"]))


def no_usage(exchange: Exchange) -> Usage:
    return Usage(input_tokens=exchange.prompt_tokens, output_tokens=0, estimated=True)
