"""A chat request's tools: the fields checked, and what may be called as one value.

{"tools": [{"type": "function", "function": {"name": "f", "parameters": {...}}}], "tool_choice": "required"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headrace.protocol import errors

Mode = Literal["auto", "none", "required", "named"]

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """`wire` is the tool as the client sent it; `parameters` the schema of its arguments."""

    name: str
    wire: Mapping[str, Any]
    parameters: Mapping[str, Any]
    strict: bool = False
    path: str = "tools"
    """Where the schema stands in the request."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """What a request lets its model call. Of mode named `tools` has one; of mode none there are none.

    `shown` are the tools that the model is told of, as the client sent them: also those that it may not call.
    """

    tools: tuple[Tool, ...] = ()
    shown: tuple[Mapping[str, Any], ...] = ()
    mode: Mode = "none"
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")


def tool_request(
    tools: list[dict[str, object]] | None, choice: str | dict[str, object] | None, parallel: bool | None
) -> ToolRequest:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`. Raises ApiError (400) naming what is malformed."""
    sent = tools or []
    if len(sent) > MAX_TOOLS:
        raise errors.invalid_value("tools", f"`tools` has {len(sent)} entries; at most {MAX_TOOLS} are allowed.")
    known = tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(sent))
    names: set[str] = set()
    for place, tool in enumerate(known):
        if tool.name in names:
            raise errors.invalid_value(f"tools[{place}].function.name", f"Two tools are called `{tool.name}`.")
        names.add(tool.name)
    mode, chosen = _choice(choice, [tool.name for tool in known])
    callable_ = known if chosen is None else tuple(tool for tool in known if tool.name in chosen)
    if mode == "none" or not callable_:
        return ToolRequest()
    return ToolRequest(callable_, tuple(tool.wire for tool in known), mode, parallel is not False)


def plain_calls(calls: object, path: str) -> list[dict[str, object]]:
    """The calls of an assistant's message as chat templates take them: arguments an object, where they are one.

    Raises ApiError (400) naming what is malformed.
    """
    if not isinstance(calls, list):
        raise errors.invalid_type(path, "a list of calls", _kind(calls))
    return [_plain_call(call, f"{path}[{place}]") for place, call in enumerate(calls)]


def _plain_call(call: object, path: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        example = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}'
        raise errors.invalid_value(path, f"`{path}` must be a call such as {example}.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _decoded(arguments) if arguments.strip() else {}
    elif arguments is None:
        arguments = {}
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _decoded(arguments: str) -> object:
    """An object, or the text itself: a model that called wrongly may be shown what it wrote."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _tool(tool: dict[str, object], path: str) -> Tool:
    kind = tool.get("type", "function")
    if kind != "function":
        raise errors.unsupported_field(f"{path}.type", f"It is {errors.quoted(kind)}; use function.")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise errors.missing_field(f"{path}.function", "a tool is described by its `function`.")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"`{path}.function.name` must be 1 to 128 letters, digits, `_`, `-` or `.`, but it is "
        raise errors.invalid_value(f"{path}.function.name", f"{message}{errors.quoted(name)}.")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise errors.invalid_type(f"{path}.function.description", "a string", _kind(description))
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise errors.invalid_type(f"{path}.function.parameters", "a JSON Schema (an object)", _kind(parameters))
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise errors.invalid_type(f"{path}.function.strict", "true or false", _kind(strict))
    return Tool(
        name,
        {"type": "function", "function": function},
        _object_schema(parameters, f"{path}.function.parameters"),
        bool(strict),
        f"{path}.function.parameters",
    )


def _object_schema(parameters: dict[str, Any] | None, path: str) -> Mapping[str, Any]:
    """Arguments are an object, whether the schema says so or not; without one, any. Raises ApiError (400) for a schema
    that allows none."""
    if not parameters:
        return {"type": "object", "properties": {}} if parameters is not None else {"type": "object"}
    kind = parameters.get("type")
    if kind is not None and kind != "object" and not (isinstance(kind, list) and "object" in kind):
        message = f"`{path}.type` is {errors.quoted(kind)}; a tool's arguments are an object, so it must be object."
        raise errors.invalid_value(f"{path}.type", message)
    values = parameters.get("enum") if "const" not in parameters else [parameters["const"]]
    if isinstance(values, list) and not all(isinstance(value, dict) for value in values):
        name = "enum" if "const" not in parameters else "const"
        message = f"`{path}.{name}` has what is no object; a tool's arguments are one."
        raise errors.invalid_value(f"{path}.{name}", message)
    return {**parameters, "type": "object"}


def _choice(choice: str | dict[str, object] | None, names: Sequence[str]) -> tuple[Mode, frozenset[str] | None]:
    """The mode, and the names of the tools that it leaves; None for all."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        return _plain(choice, names, "tool_choice"), None
    kind = choice.get("type", "function")
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
            raise errors.missing_field("tool_choice.allowed_tools.tools", "list the tools that may be called.")
        entries = [entry for entry in allowed["tools"] if isinstance(entry, dict)]
        chosen = frozenset(_known(_name_in(entry), names) for entry in entries)
        mode = _plain(str(allowed.get("mode", "auto")), names, "tool_choice.allowed_tools.mode")
        return mode, chosen
    if kind != "function":
        raise errors.invalid_value("tool_choice.type", f"`tool_choice.type` is {errors.quoted(kind)}; use function.")
    return "named", frozenset([_known(_name_in(choice), names)])


def _plain(choice: str, names: Sequence[str], param: str) -> Mode:
    match choice:
        case "auto" | "none":
            return choice
        case "required" | "any":
            if not names:
                raise errors.invalid_value(param, f"`{param}` demands a call, but `tools` is missing or empty.")
            return "required"
    guess = errors.nearest(choice, _CHOICES)
    hint = f" Did you mean `{guess}`?" if guess else ""
    allowed = "auto, none, required, or an object that names a tool"
    raise errors.invalid_value(param, f"`{param}` is {errors.quoted(choice)}; use {allowed}.{hint}")


def _name_in(entry: Mapping[str, object]) -> object:
    function = entry.get("function")
    return function.get("name") if isinstance(function, dict) else entry.get("name")


def _known(name: object, names: Sequence[str]) -> str:
    if isinstance(name, str) and name in names:
        return name
    guess = errors.nearest(name, names) if isinstance(name, str) else None
    hint = f" Did you mean `{guess}`?" if guess else ""
    param = "tool_choice.function.name"
    raise errors.invalid_value(param, f"`tool_choice` names {errors.quoted(name)}, which `tools` lacks.{hint}")


def _kind(value: object) -> str:
    return errors.quoted(value)
