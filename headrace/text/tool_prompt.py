"""How a request's tools, and calls and results of earlier turns, reach the model's chat template.

Most templates take `tools`; some read them from the system message. A template that knows nothing of tools is told in
plain words: the tools in the system message; and if it knows no calls either, those as the format writes them, and
results in the user's turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.text.chat_template import ChatTemplate
from headrace.text.tool_formats import ToolFormat

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]

_INSTRUCTIONS = """\
You can call tools. To call one, answer in exactly this form, with the tool's name and its arguments as a JSON object:
{example}
What a tool returns is given to you between <tool_response> and </tool_response>. The tools, as JSON Schema:
{tools}"""


def knows_tools(template: ChatTemplate) -> bool:
    """Whether the template shows the model a request's tools."""
    return "tools" in template.variables or _in_system_message(template)


def _in_system_message(template: ChatTemplate) -> bool:
    return any(word in template.source for word in ("message['tools']", 'message["tools"]', "message.tools"))


def prepared(
    template: ChatTemplate, format: ToolFormat, messages: Sequence[Message], tools: Tools
) -> tuple[list[Message], list[Mapping[str, Any]] | None]:
    """Messages and tools as this template takes them; `format` is how calls are put into words where it takes none."""
    knows_calls = "tool_calls" in template.source
    told = [_with_arguments(message) if knows_calls else _in_words(message, format) for message in messages]
    if "tools" in template.variables:
        return told, list(tools) or None
    if tools and _in_system_message(template):
        told = _with_system(told, "tools", json.dumps([_function(tool) for tool in tools], ensure_ascii=False))
    elif tools:
        told = _with_system(told, "content", _instructions(format, tools))
    return told, None


def _with_system(messages: Sequence[Message], field: str, text: str) -> list[Message]:
    """The messages with `text` in a field of the system message, after what is there."""
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    system = {"role": "system", "content": ""} if first is None else dict(first)
    said = system.get(field)
    system[field] = f"{said}\n\n{text}" if said else text
    return [system, *(messages if first is None else messages[1:])]


def _instructions(format: ToolFormat, tools: Tools) -> str:
    described = "\n".join(json.dumps(_function(tool), ensure_ascii=False) for tool in tools)
    return _INSTRUCTIONS.format(example=format.written([("NAME", "{...}")]), tools=described)


def _function(tool: Mapping[str, Any]) -> object:
    return tool.get("function", tool)


class Arguments(dict[str, Any]):
    """A call's arguments as every template wants them: an object for those that write it out by `tojson` or item by
    item, and its JSON text for those that join it to their own."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _with_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_joinable(call) for call in calls]}


def _joinable(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], dict):
        return call
    return {**call, "function": {**function, "arguments": Arguments(function["arguments"])}}


def _in_words(message: Message, format: ToolFormat) -> Message:
    """A call or a result as text."""
    calls = message.get("tool_calls")
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    if not calls:
        return message
    written = format.written([_call(call) for call in calls])
    content = f"{message['content']}\n{written}" if message.get("content") else written
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call["function"]
    arguments = function["arguments"]
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
