"""JSON Schemas at random, of what grammars enforce: each can be satisfied, and its answers cannot be very long."""

from __future__ import annotations

from random import Random
from typing import Any

WORDS = ("name", "size", "kind", "tags", "note", "ok", "Größe", "a b", "x/y", 'quo"te', "$id2", "")
PATTERNS = ("^[a-f]{2,5}$", "^(red|green|blue)$", "^[A-Z][a-z]*[0-9]$", "^a{0,3}b?$", "^\\d{3}-\\d{2}$", "[xyz]")
FORMATS = ("date", "uuid", "ipv4", "time")


def random_schema(random: Random, depth: int = 2) -> dict[str, Any]:
    """Deeper than `depth` come only scalars. What is referred to is at the root."""
    definitions: dict[str, Any] = {}
    schema = _hoisted(_schema(random, depth), definitions)
    assert isinstance(schema, dict)
    return {**schema, "$defs": definitions} if definitions else schema


def _hoisted(value: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_hoisted(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    for name, part in value.get("$defs", {}).items():
        definitions[name] = _hoisted(part, definitions)
    return {name: _hoisted(item, definitions) for name, item in value.items() if name != "$defs"}


def _schema(random: Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth:
        kinds += ["object"] * 5 + ["array"] * 3 + ["tuple", "anyOf", "allOf", "ref", "types", "map", "oneOf"]
    kind = random.choice(kinds)
    return _MAKERS[kind](random, depth)


def _string(random: Random, depth: int) -> dict[str, Any]:
    low = random.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + random.randint(0, 6)}


def _integer(random: Random, depth: int) -> dict[str, Any]:
    low = random.randint(-1000, 1000)
    limits = {"minimum": low, "maximum": low + random.randint(0, 5000)}
    if random.random() < 0.2:
        limits = {"exclusiveMinimum": low, "exclusiveMaximum": low + random.randint(2, 50)}
    if random.random() < 0.2:
        limits = {"minimum": 0, "maximum": 1000, "multipleOf": random.choice((2, 5, 10))}
    return {"type": "integer", **limits} if random.random() < 0.9 else {"type": "integer"}


def _number(random: Random, depth: int) -> dict[str, Any]:
    low = random.randint(-50, 50)
    limits = {"minimum": low, "exclusiveMaximum": low + random.choice((0.5, 1, 10))}
    return {"type": "number", **limits} if random.random() < 0.7 else {"type": "number"}


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(WORDS, random.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(random, depth - 1) for name in names},
        "required": [name for name in names if random.random() < 0.6],
        "additionalProperties": False,
    }
    if random.random() < 0.2:
        schema["title"] = "a thing"
        schema["description"] = "with words that ask for nothing"
    return schema


def _array(random: Random, depth: int) -> dict[str, Any]:
    low = random.randint(0, 2)
    most = low + random.randint(0, 2)
    return {"type": "array", "items": _schema(random, depth - 1), "minItems": low, "maxItems": most}


def _tuple(random: Random, depth: int) -> dict[str, Any]:
    first = [_schema(random, depth - 1) for _ in range(random.randint(1, 3))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": random.randint(0, len(first))}


def _any_of(random: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(random, depth - 1) for _ in range(random.randint(1, 3))]}


def _all_of(random: Random, depth: int) -> dict[str, Any]:
    first, second = _object(random, depth), _object(random, depth)
    for schema in (first, second):
        del schema["additionalProperties"]
        schema["properties"] = {name: _schema(random, 0) for name in schema["properties"]}
    second["properties"] = {n: s for n, s in second["properties"].items() if n not in first["properties"]}
    both = [*first["properties"], *second["properties"]]
    named = {"properties": dict.fromkeys(both, True), "additionalProperties": False}
    second["required"] = [name for name in second["required"] if name in both]
    return {"type": "object", "allOf": [first, second, named]}


def _one_of(random: Random, depth: int) -> dict[str, Any]:
    kinds = ("cat", "dog", "fish")
    options = []
    for kind in kinds:
        name = random.choice(WORDS[:5])
        rest = {} if name == "kind" else {name: _schema(random, depth - 1)}
        properties = {"kind": {"const": kind}, **rest}
        options.append(
            {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}
        )
    return {"oneOf": options}


def _ref(random: Random, depth: int) -> dict[str, Any]:
    part = _schema(random, depth - 1)
    name = f"part{random.randrange(10**9)}"
    return {
        "$defs": {name: part},
        "type": "array",
        "items": {"$ref": f"#/$defs/{name}"},
        "minItems": 1,
        "maxItems": 2,
    }


def _types(random: Random, depth: int) -> dict[str, Any]:
    kinds = random.sample(["string", "integer", "boolean", "null"], random.randint(1, 3))
    return {"type": kinds, "maxLength": 5, "minimum": 0, "maximum": 9}


def _map(random: Random, depth: int) -> dict[str, Any]:
    return {
        "type": "object",
        "patternProperties": {"^[a-c]{1,2}$": _schema(random, 0)},
        "additionalProperties": False,
        "maxProperties": random.randint(1, 3),
    }


def _scalar(random: Random) -> Any:
    return random.choice([None, True, 0, -7, 12.5, "", "a b", 'quo"te', "é😀", "line\nend"])


_MAKERS: dict[str, Any] = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda random, depth: {"type": "boolean"},
    "null": lambda random, depth: {"type": "null"},
    "enum": lambda random, depth: {"enum": [_scalar(random) for _ in range(random.randint(1, 4))]},
    "const": lambda random, depth: {"const": random.choice([_scalar(random), [1, "a"], {"k": [None]}])},
    "pattern": lambda random, depth: {"type": "string", "pattern": random.choice(PATTERNS), "maxLength": 12},
    "format": lambda random, depth: {"type": "string", "format": random.choice(FORMATS)},
    "object": _object,
    "array": _array,
    "tuple": _tuple,
    "anyOf": _any_of,
    "allOf": _all_of,
    "oneOf": _one_of,
    "ref": _ref,
    "types": _types,
    "map": _map,
}
