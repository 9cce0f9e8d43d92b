"""What a client of another dialect calls the fields of the chat request that its own became: for errors it can act on.

tools[0].function.parameters.type  ->  tools[2].input_schema.type        (a tool before it is not the client's own)
messages[3].content[0]             ->  messages                          (turns are joined and split on the way)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.protocol.errors import ApiError
from headrace.protocol.translate.events import Dialect

_OWN_NAMES: Mapping[Dialect, Mapping[str, str]] = {
    "messages": {
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "tool_choice.function.name": "tool_choice.name",
        "thinking_token_budget": "thinking.budget_tokens",
        "user": "metadata.user_id",
    },
    "responses": {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "tool_choice.function.name": "tool_choice.name",
    },
}
_PARAMETERS: Mapping[Dialect, str] = {"messages": "input_schema", "responses": "parameters"}
_MESSAGE = re.compile(r"(?<![\w.])messages\[\d+\](?:\.\w+|\[\d+\])*")
_TOOL = re.compile(r"(?<![\w.])tools\[(\d+)\]\.function(?:\.(parameters)(?!\w))?")
_UPSTREAM = re.compile(r"\b(?:a chat|the|an) upstream('s dialect)?\b")


@dataclass(frozen=True, slots=True)
class ClientNames:
    """`tools`: where each tool of the chat request stands in the client's."""

    dialect: Dialect
    tools: tuple[str, ...] = ()

    def of(self, text: str) -> str:
        """A field's path in the chat request, or all of them in a message, where the client has them."""
        text = _TOOL.sub(self._tool, _MESSAGE.sub("messages", text))
        names = _OWN_NAMES[self.dialect]
        known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        return re.sub(rf"(?<=`)(?:{known})(?![\w])|^(?:{known})(?![\w ])", lambda found: names[found[0]], text)

    def _tool(self, found: re.Match[str]) -> str:
        place = int(found[1])
        path = self.tools[place] if place < len(self.tools) else f"tools[{place}]"
        return f"{path}.{_PARAMETERS[self.dialect]}" if found[2] else path


@contextmanager
def named_as(names: ClientNames) -> Iterator[None]:
    """An ApiError inside names its fields as the client does."""
    try:
        yield
    except ApiError as error:
        raise ApiError(
            error.status,
            _UPSTREAM.sub("this server", names.of(error.message)),
            type=error.type,
            code=error.code,
            param=None if error.param is None else names.of(error.param),
            headers=error.headers,
        ) from None
