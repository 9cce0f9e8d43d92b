"""Numbers in a JSON Schema: each reaches the grammar library as it was sent, or the request is refused.

The library reads every number as a double, and not always as the nearest one. A constant that it would change is an
error. A limit that it would change is moved inwards, to the next number that it keeps: all that it then lets through
the limit as it was sent lets through too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, NoReturn, TypeGuard

import msgspec

from headrace.protocol import errors

SCHEMA_FIELDS = frozenset(
    "response_format structured_outputs guided_json json_schema structural_tag tools functions output_config"
    " output_format text".split()
)
"""Fields of a request, in every dialect, that hold schemas."""

_EXACT = 1 << 53
"""Up to here a double keeps every integer apart, and whether a limit is exclusive."""
_LARGEST = (1 << 63) - 1024
"""The largest double that the library counts integers up to."""
_LARGEST_LIMIT = 10**18
"""So far it follows limits of numbers that need not be integers."""
_CONSTANTS = ("const", "enum")
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OTHERS = ("default", "examples")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LONG = re.compile(rb"[0-9.]{16}|[0-9][eE]")


def check_number_texts(raw: bytes | str, field: str) -> None:
    """Raises ApiError (400) for a schema with a number, as JSON text, whose value reading it as a double changes.

    `raw` is valid JSON, `field` its place in the request.
    """
    encoded = raw.encode() if isinstance(raw, str) else raw
    if not _LONG.search(encoded):
        return
    try:
        value = json.loads(encoded, parse_float=_Literal)
    except ValueError:  # what is wrong with it is said where it is read
        return
    _check_literals(value, field, is_bound=False)


class _Literal(str):
    """A number with a point or an exponent, as its text."""

    __slots__ = ()


def _check_literals(value: object, path: str, *, is_bound: bool) -> None:
    """`is_bound`: the value is, or is in, what an answer is compared with."""
    if isinstance(value, dict):
        for name, item in value.items():
            bound = is_bound or name in _CONSTANTS or name in _LIMITS or name == "multipleOf"
            _check_literals(item, f"{path}.{name}", is_bound=bound)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            _check_literals(item, f"{path}[{place}]", is_bound=is_bound)
    elif is_bound and isinstance(value, _Literal):
        read = float(value)
        if math.isinf(read) or Decimal(value) != Decimal(repr(read)):
            _refuse(path, value)


def with_kept_numbers(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The schema with numbers that the library keeps. Raises ApiError (400) naming the path of one that it cannot."""

    def inside(value: object, at: str) -> object:
        if isinstance(value, Mapping):
            return with_kept_numbers(value, at)
        return [inside(item, f"{at}[{i}]") for i, item in enumerate(value)] if isinstance(value, list) else value

    own: dict[str, Any] = {}
    for keyword, value in schema.items():
        at = f"{path}.{keyword}"
        if keyword in _BY_NAME and isinstance(value, Mapping):
            own[keyword] = {name: inside(item, f"{at}.{name}") for name, item in value.items()}
        elif keyword in _CONSTANTS:
            _check_constant(value, at)
            own[keyword] = value
        elif keyword == "multipleOf" and _is_number(value):
            if not _is_kept(value):
                _refuse(at, value)
            own[keyword] = value
        else:
            own[keyword] = value if keyword in _OTHERS else inside(value, at)
    return _narrowed(own, path)


def _check_constant(value: object, path: str) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_constant(item, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            _check_constant(item, f"{path}[{place}]")
    elif _is_number(value) and not _is_kept(value):
        _refuse(path, value)


def _narrowed(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Limits moved that the library would change, and exclusive ones where it does not tell them apart."""
    largest = _LARGEST if schema.get("type") == "integer" else _LARGEST_LIMIT
    moved: dict[str, int | float] = {}
    for name in _LIMITS:
        value = schema.get(name)
        if _is_number(value) and _must_move(value, name, largest):
            inner = _inwards(value, name, largest)
            if inner is None:
                _refuse(f"{path}.{name}", value)
            moved[name] = inner
    if not moved:
        return schema
    sent = {name: schema[name] for name in _LIMITS if _is_number(schema.get(name))}
    own = {name: value for name, value in schema.items() if name not in sent}
    ends = {"minimum": max, "maximum": min}
    for end, tightest in ends.items():
        exclusive = "exclusive" + end.capitalize()
        plain = [moved[name] for name in (end, exclusive) if name in moved]
        plain += [sent[end]] if end in sent and end not in moved else []
        if plain:
            own[end] = tightest(plain)
        if exclusive in sent and exclusive not in moved:
            own[exclusive] = sent[exclusive]
    if own.get("minimum", -math.inf) > own.get("maximum", math.inf):
        name = next(iter(moved))
        _refuse(f"{path}.{name}", sent[name])
    return own


def _must_move(value: int | float, name: str, largest: int) -> bool:
    return not _is_kept(value) or abs(value) > largest or (abs(value) >= _EXACT and name.startswith("exclusive"))


def _inwards(value: int | float, name: str, largest: int) -> int | float | None:
    """The nearest number that is kept on the inner side of a limit; None where there is none to count to."""
    is_low = name.lower().endswith("minimum")
    inner = 1 if is_low else -1
    if value * inner < -largest:
        return -inner * largest
    if abs(value) > largest:
        return None
    if abs(value) < _EXACT:
        rounding = ROUND_CEILING if is_low else ROUND_FLOOR
        short = float(Context(prec=15, rounding=rounding).create_decimal(repr(value)))
        return short if _is_kept(short) else None
    step = float(value)  # every double as large as this is an integer
    while (step - value if isinstance(value, float) else int(step) - value) * inner < 0 or (
        name.startswith("exclusive") and step == value
    ):
        step = math.nextafter(step, inner * math.inf)
    return int(step) if abs(step) <= largest else None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_kept(value: int | float) -> bool:
    """Whether the library writes and compares this number, and no other near it."""
    if isinstance(value, int):
        return abs(value) <= _LARGEST and int(float(value)) == value
    return _read(Decimal(msgspec.json.encode(value).decode())) == value


def _read(value: Decimal) -> float:
    """A number with a point or an exponent as the library reads it: its digits, then a power of ten, each rounded."""
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or abs(exponent) > 308:
        return math.nan
    whole, power = float(int("".join(map(str, digits)))), float(f"1e{abs(exponent)}")
    read = whole * power if exponent >= 0 else whole / power
    return -read if sign else read


def _refuse(path: str, value: object) -> NoReturn:
    message = f"`{path}` is {value}, and this server cannot keep answers to it up to the last digit."
    hint = " It keeps integers up to 2^53 and numbers of 15 digits; send longer ones as strings."
    raise errors.invalid_value(path, message + hint)
