"""How a request's tools, and calls and results of earlier turns, reach the model's chat template.

Most templates take `tools`; some read them from the system message. A template that knows nothing of tools is told in
plain words: the tools in the system message, calls as the format writes them, results in the user's turn.
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
    template: ChatTemplate, format: ToolFormat | None, messages: Sequence[Message], tools: Tools
) -> tuple[list[Message], list[Mapping[str, Any]] | None]:
    """Messages and tools as this template takes them. `format` None: no request has tools here."""
    if "tools" in template.variables:
        return list(messages), list(tools) or None
    if _in_system_message(template):
        listed = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
        return (_with_system(messages, "tools", listed) if tools else list(messages)), None
    if format is None:
        return list(messages), None
    told = [_in_words(message, format) for message in messages]
    if tools:
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
    described = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return _INSTRUCTIONS.format(example=format.written([("NAME", "{...}")]), tools=described)


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
