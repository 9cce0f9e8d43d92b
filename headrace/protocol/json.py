"""Reading a JSON request body into a typed value, with errors that say where and what.

Strict: one object, no key twice at the top level (`{"model": "a", "model": "b"}` may mean different things to
whoever reads it next), `true` is no number, NaN and infinity do not exist. Fields that the type does not have
are kept by name with their values, because nothing may be silently ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from headrace.protocol import errors
from headrace.protocol.errors import ApiError, quoted
from headrace.protocol.schema_numbers import SCHEMA_FIELDS, check_number_texts

T = TypeVar("T", bound=msgspec.Struct)

# A string (with a colon after it, it is a key) or a bracket; everything else cannot change the depth.
_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"(\s*+:)?+|[{}\[\]]', re.DOTALL)

_PROBLEM = re.compile(r"^(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `(?P<expected>.+?)`, got `(?P<found>.+?)`$")

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")

_SPOKEN = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


class Body:
    """The outermost object of a request. Each part of the server reads the fields it knows into its own type."""

    def __init__(self, body: bytes) -> None:
        """Raises ApiError (400) unless `body` is one JSON object with distinct keys."""
        self._body = body
        self._read: set[str] = set()
        with _as_api_errors(body):
            self._fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            for name in _top_level_duplicates(body, len(self._fields)):
                raise errors.duplicate_key(name)
            for name in SCHEMA_FIELDS & self._fields.keys():
                check_number_texts(bytes(self._fields[name]), name)

    def read(self, type: type[T]) -> T:
        """The fields of `type`. Raises ApiError (400) when one of them has another type or is missing."""
        self._read.update(field.encode_name for field in msgspec.structs.fields(type))
        with _as_api_errors(self._body, type):
            return msgspec.json.decode(self._body, type=type)

    def others(self) -> dict[str, object]:
        """The fields that nobody has read so far."""
        with _as_api_errors(self._body):
            return {name: msgspec.json.decode(raw) for name, raw in self._fields.items() if name not in self._read}


def read_value(raw: bytes | msgspec.Raw, body: bytes) -> Any:
    """The value `raw`, a part of `body` or all of it. Raises ApiError (400): what is skipped when the outermost object
    is read may still hold bytes that are not UTF-8, or a number that is too large."""
    with _as_api_errors(body):
        return msgspec.json.decode(raw)


@contextmanager
def _as_api_errors(body: bytes, type: type[msgspec.Struct] | None = None) -> Iterator[None]:
    """`type`: what is read, where its fields' allowed values may have to be named."""
    try:
        yield
    except msgspec.ValidationError as error:
        _check_whole(body)
        raise _invalid_field(str(error), body, type) from None
    except msgspec.DecodeError as error:
        raise errors.invalid_json(_malformed(body, str(error))) from None
    except RecursionError:
        raise errors.invalid_json("it is nested too deeply.") from None


def _top_level_duplicates(body: bytes, num_distinct: int) -> list[str]:
    """Keys that occur more than once in the outermost object of valid JSON with `num_distinct` distinct keys."""
    depth = 0
    keys: list[bytes] = []
    for match in _STRUCTURE.finditer(body):
        first = body[match.start()]
        if first == 0x22:
            if depth == 1 and match.group(1) is not None:
                keys.append(body[match.start() : match.start(1)])
        elif first in b"{[":
            depth += 1
        else:
            depth -= 1
    if len(keys) == num_distinct:
        return []
    seen: set[str] = set()
    twice = []
    for key in keys:
        name = str(msgspec.json.decode(key))
        if name in seen:
            twice.append(name)
        seen.add(name)
    return twice


def _malformed(body: bytes, problem: str) -> str:
    """What is wrong and where, in lines and columns; the standard parser's wording is the one people know."""
    if not body.strip():
        return 'it is empty. Send an object such as {"messages": [...]}.'
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8."
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        msgspec.json.encode(value)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20].replace("\n", " ")
        return f"{error.msg.removesuffix(' at')} at line {error.lineno} column {error.colno} (near `{near}`)."
    except UnicodeEncodeError:
        return "a string holds half of a surrogate pair (such as \\ud83d alone)."
    except _Constant as error:
        return f"{error} is not a JSON number."
    except (RecursionError, ValueError):
        return "it is nested too deeply or holds a number that is too long."
    return f"{problem}."


class _Constant(Exception):
    pass


def _refuse_constant(name: str) -> object:
    raise _Constant(name)


def _check_whole(body: bytes) -> None:
    """A wrong type is found before what stands behind it is read. Raises ApiError (400) if that is no JSON."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        raise errors.invalid_json(_malformed(body, str(error))) from None


def _invalid_field(problem: str, body: bytes, type: type[msgspec.Struct] | None) -> ApiError:
    match = _PROBLEM.match(problem)
    assert match is not None
    path, problem = match["path"], match["problem"]
    expected = _EXPECTED.match(problem)
    if not path:
        if expected is not None:
            return errors.not_an_object(_spoken(expected["found"]))
        missing = re.match(r"Object missing required field `(.+)`", problem)
        if missing is not None:
            return errors.missing_field(missing[1], "this field is required.")
        return ApiError(400, f"The request body is not valid: {problem}.", code="invalid_value")
    if expected is None and type is not None and (allowed := _allowed_values(type, path)):
        return errors.invalid_value(path, f"`{path}` must be {allowed}, but it is{_value_at(body, path, ' {}')}.")
    if expected is None:
        return errors.invalid_value(path, f"`{path}` is not valid: {problem}.")
    if match["key"]:
        wanted, key = _spoken(expected["expected"]), _key_at_fault(body, path)
        return errors.invalid_value(path, f"a key of `{path}` must be {wanted}, but one is {key}.")
    return errors.invalid_type(path, _spoken(expected["expected"]), _spoken(expected["found"]) + _value_at(body, path))


def _spoken(kinds: str) -> str:
    names = [_SPOKEN.get(kind.strip(), kind.strip()) for kind in kinds.split("|")]
    return " or ".join(name for name in names if name != "null" or len(names) == 1)


def _value_at(body: bytes, path: str, form: str = " ({})") -> str:
    """The value of a top-level field, for the message; nested ones are named by their path alone."""
    if not path.isidentifier():
        return ""
    value = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get(path)
    if value is None or len(value) > errors.MAX_QUOTED_CHARS:
        return ""
    return form.format(quoted(msgspec.json.decode(value)))


def _key_at_fault(body: bytes, path: str) -> str:
    """The first key of a top-level object that is no integer, for the message."""
    value = msgspec.json.decode(body).get(path)
    keys = value if isinstance(value, dict) else ()
    return next((quoted(key) for key in keys if not _INTEGER.fullmatch(key)), "another")


def _allowed_values(type: type[msgspec.Struct], name: str) -> str:
    """The values of a field that has a fixed set of them, as words; else ""."""
    for field in msgspec.structs.fields(type):
        if field.encode_name == name:
            info = msgspec.inspect.type_info(field.type)
            kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
            values = [v for kind in kinds if isinstance(kind, msgspec.inspect.LiteralType) for v in kind.values]
            return " or ".join(quoted(value) for value in values)
    return ""
