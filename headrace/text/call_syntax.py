"""Where a tool call's text ends, and what it says: balanced JSON or Python found as it comes, then decoded once.

`Span` counts brackets outside strings, so a text that grows is looked at once. What it has marked out is decoded by
`json_calls`, `python_calls` or `arguments_text`, each of which gives None for what is no call. Calls in tags have an
end of their own, and values whose types only the tool's schema tells (`tagged_call`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

RawCall = tuple[str, str]
"""A name, and arguments as the text of a JSON object."""

MAX_PYTHON_CHARS = 200_000
"""Longer ones are text: Python's parser takes 100 bytes of memory a character."""

_JSON_MARKS = re.compile(r'["{}\[\]]')
_PYTHON_MARKS = re.compile(r"[\"'{}\[\]()]")
_STRING_ENDS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_KEYS = ("name", "arguments", "parameters", "type", "function", "id")
_OBJECT_START = re.compile(r'\{\s*(?:\Z|"(?P<key>\w*)(?P<end>"?))')
_PYTHON_START = re.compile(r"\[?\s*(?:\Z|[A-Za-z_][\w.]*\s*(?:\Z|\())")


class Span:
    """The first bracketed value of a text: `end` looks at what is new in it and gives the place after the value.

    JSON's strings are in double quotes; Python's in either.
    """

    def __init__(self, *, python: bool) -> None:
        self.python = python
        self._marks = _PYTHON_MARKS if python else _JSON_MARKS
        self._at = 0
        self._depth = 0
        self._quote = ""

    def end(self, text: str) -> int | None:
        """None while the value is not complete. `text` is the last call's and more."""
        at = self._at
        while at < len(text):
            if self._quote:
                found = _STRING_ENDS[self._quote].search(text, at)
                if found is None:
                    at = len(text)
                elif found[0] == "\\":
                    if found.end() == len(text):
                        at = found.start()
                        break
                    at = found.end() + 1
                else:
                    self._quote, at = "", found.end()
                continue
            found = self._marks.search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            mark = found[0]
            if mark in "\"'":
                self._quote = mark
            elif mark in "{[(":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return at
        self._at = at
        return None


def may_be_json_call(text: str) -> bool:
    """Whether `text`, the beginning of something, can still become a call object or a list of them."""
    inner = text[1:].lstrip() if text.startswith("[") else text
    if not inner:
        return True
    found = _OBJECT_START.match(inner)
    if found is None or found["key"] is None:
        return found is not None
    return found["key"] in _KEYS if found["end"] else any(key.startswith(found["key"]) for key in _KEYS)


def may_be_python_call(text: str) -> bool:
    return _PYTHON_START.match(text) is not None


def json_calls(text: str) -> list[RawCall] | None:
    """The calls of a JSON object, or of a list of them."""
    value = _decoded(text)
    entries = value if isinstance(value, list) else [value]
    calls = [_json_call(entry) for entry in entries]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _json_call(entry: Any) -> RawCall | None:
    if not isinstance(entry, dict):
        return None
    inner = entry.get("function")
    if isinstance(inner, dict):
        entry = inner
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        return None
    arguments = entry.get("arguments", entry.get("parameters"))
    if isinstance(arguments, str):
        arguments = _decoded(arguments) if arguments.strip() else {}
    written = _object_text({} if arguments is None else arguments)
    return None if written is None else (name, written)


def arguments_text(text: str) -> str | None:
    """The text of a JSON object, as JSON that everybody reads."""
    return _object_text(_decoded(text))


def python_calls(text: str) -> list[RawCall] | None:
    """`f(a=1)`, `print(f(a=1))` or `[f(a=1), g()]`: keyword arguments of literals."""
    if len(text) > MAX_PYTHON_CHARS:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        entries = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(entry) for entry in entries] or None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _python_call(entry: ast.expr) -> RawCall:
    if isinstance(entry, ast.Call) and isinstance(entry.func, ast.Name) and entry.func.id == "print":
        (entry,) = entry.args or [entry]
    if not isinstance(entry, ast.Call) or entry.args:
        raise ValueError("not a call with keyword arguments")
    arguments = {keyword.arg: _literal(keyword.value) for keyword in entry.keywords}
    written = None if None in arguments else _object_text(arguments)
    if written is None:
        raise ValueError("arguments that are no JSON")
    return ast.unparse(entry.func), written


def _literal(node: ast.expr) -> Any:
    """A value of Python or JSON as Python has it. Raises ValueError for anything that would have to be computed."""
    match node:
        case ast.Constant(value=None | bool() | str() | int() | float() as value):
            return value
        case ast.Name(id="true" | "false" | "null" as word):
            return {"true": True, "false": False, "null": None}[word]
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_literal(entry) for entry in entries]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_key(key): _literal(value) for key, value in pairs}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _literal(node)
    if not isinstance(key, str):
        raise ValueError("not a key of JSON")
    return key


TAGGED_START, TAGGED_END = "<function=", "</function>"
_TAGGED = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def tagged_call(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[RawCall] | None:
    """`<function=f><parameter=a>1</parameter></function>`: a value is text where the schema says so or says nothing,
    else JSON, and text if it is none."""
    found = _TAGGED.fullmatch(text)
    if found is None:
        return None
    name = found[1].strip()
    properties = schemas.get(name, {}).get("properties")
    types = properties if isinstance(properties, Mapping) else {}
    arguments = {
        key.strip(): _tagged_value(value, types.get(key.strip())) for key, value in _PARAMETER.findall(found[2])
    }
    written = _object_text(arguments)
    return [(name, written)] if name and written is not None else None


def _tagged_value(text: str, schema: object) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else "string"
    if kind == "string" or (isinstance(kind, list) and "string" in kind and text.strip() != "null"):
        return text
    value = _decoded(text)
    return text if value is None and text.strip() != "null" else value


def _decoded(text: str) -> Any:
    """JSON, also with line breaks inside strings, which models forget to escape. None for what is not JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _object_text(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # Half a surrogate pair can be written as an escape only.
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return text
