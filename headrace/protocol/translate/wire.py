"""Looking into decoded JSON of a client's request: the value, or an ApiError 400 that names the place.

items(body["messages"], "messages")  ->  [("messages[0]", {...}), ("messages[1]", {...})]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocol import errors
from headrace.protocol.errors import ApiError

Json = dict[str, Any]

INVALID_ARGUMENTS = "_invalid_json"
"""Where a dialect wants a tool's arguments as an object and the model wrote something else, its text stands under
this name, and goes back unchanged."""

MAX_TOKENS = 1 << 40
"""Of one answer. An upstream that tells more is mistaken, and no database would take the sum."""

_encode = msgspec.json.Encoder().encode


def encode_text(value: object) -> str:
    return _encode(value).decode()


def string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise errors.invalid_type(path, "a string", kind(value))
    return value


def optional_string(value: object, path: str) -> str | None:
    return None if value is None else string(value, path)


def optional_int(value: object, path: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise errors.invalid_type(path, "an integer", kind(value))
    return value


def optional_number(value: object, path: str) -> int | float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise errors.invalid_type(path, "a number", kind(value))
    return value


def optional_bool(value: object, path: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise errors.invalid_type(path, "true or false", kind(value))
    return value


def mapping(value: object, path: str) -> Json:
    if not isinstance(value, dict):
        raise errors.invalid_type(path, "an object", kind(value))
    return value


def optional_mapping(value: object, path: str) -> Json | None:
    return None if value is None else mapping(value, path)


def items(value: object, path: str) -> list[tuple[str, Json]]:
    """The objects of a list, each with its path. None counts as an empty list."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise errors.invalid_type(path, "a list", kind(value))
    return [(f"{path}[{place}]", mapping(item, f"{path}[{place}]")) for place, item in enumerate(value)]


def strings(value: object, path: str) -> tuple[str, ...]:
    """A string or a list of strings, as a tuple; None is the empty one."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise errors.invalid_type(path, "a string or a list of strings", kind(value))
    return tuple(string(item, f"{path}[{place}]") for place, item in enumerate(value))


def kind(value: object) -> str:
    match value:
        case None:
            return "missing or null"
        case bool():
            return "true or false"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case _:
            return "an object"


def impossible(param: str, why: str) -> ApiError:
    """A request that the upstream's dialect has no words for. `param` names the field of the client's body."""
    return ApiError(400, f"`{param}` cannot be served: {why}", code="unsupported_parameter", param=param)


def arguments_object(text: str) -> Json:
    """A tool call's arguments as an object, for dialects that want one."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {INVALID_ARGUMENTS: text}
    if value is None:
        return {}
    return value if isinstance(value, dict) else {INVALID_ARGUMENTS: text}


def arguments_text(value: object) -> str:
    """The inverse of `arguments_object`. Some servers write the object where the text belongs; both are taken."""
    if value is None:
        return "{}"
    if isinstance(value, str):
        return value or "{}"
    kept = value.get(INVALID_ARGUMENTS) if isinstance(value, dict) and len(value) == 1 else None
    return kept if isinstance(kept, str) else encode_text(value)


def at(value: Mapping[str, Any] | None, *names: str) -> Any:
    """A value deep in an upstream's answer, None where any step is missing. Upstreams leave out what they like."""
    found: Any = value
    for name in names:
        if not isinstance(found, dict):
            return None
        found = found.get(name)
    return found


def told(value: object) -> list[Json]:
    """The objects of a list in an upstream's answer; whatever is none is left out."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def count(value: object) -> int:
    """A number of tokens as an upstream wrote it; 0 for anything else, also for more than any answer can have."""
    if (type(value) is int or type(value) is float) and 0 <= value <= MAX_TOKENS:
        return int(value)
    return 0
