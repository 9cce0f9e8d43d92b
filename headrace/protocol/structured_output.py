"""The request fields that say what an answer must match, in everybody's spelling, and the one grammar they mean.

    response_format      OpenAI's: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}
    structured_outputs   vLLM's now: {"json": ...}, {"regex": ...}, {"choice": [...]}, {"grammar": ...} ...
    guided_json ...      vLLM's before
    json_schema, grammar, regex, ebnf   llama.cpp's and SGLang's

Two fields that ask for something contradict each other, even if they ask for the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.protocol import errors
from headrace.protocol.grammar_text import BLANKS, changed, check_depth, check_size, json_schema_grammar
from headrace.protocol.ipc import GrammarSpec
from headrace.protocol.sampling import AnySchema, SamplingFields
from headrace.protocol.schema_numbers import check_number_texts
from headrace.protocol.structural_tag import structural_tag_grammar

MAX_CHOICES = 20_000
MAX_BLANKS_CHARS = 1024

T = TypeVar("T")


class StructuredOutputs(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"json_": "json"}
):
    """The field `structured_outputs`: one of the first six, and how JSON is to be written."""

    json_: AnySchema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    """Compact JSON."""
    disable_additional_properties: bool | None = None
    """Objects have the properties that the schema names and no others."""
    whitespace_pattern: str | None = None
    """A regular expression for what may stand between the tokens of JSON."""
    disable_fallback: bool | None = None
    """No effect: there is one backend."""


class ResponseFormatSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`json_schema` of the field `response_format`; `strict` or not, the answer matches."""

    schema: AnySchema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The field `response_format`; `schema` beside the type is llama.cpp's spelling."""

    type: str
    json_schema: ResponseFormatSchema | None = None
    schema: AnySchema | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = None


class JSONStyle(msgspec.Struct, frozen=True):
    """How JSON is written where the request does not say it: `blanks` as in `schema_text`; `closed` objects have the
    properties that their schema names and no others."""

    blanks: str = BLANKS
    closed: bool = False

    @classmethod
    def of(cls, *, compact: bool, closed: bool) -> JSONStyle:
        return cls("" if compact else BLANKS, closed)


USUAL_STYLE = JSONStyle()


def asked_grammar(
    fields: SamplingFields, special_tokens: Mapping[str, int], style: JSONStyle = USUAL_STYLE
) -> GrammarSpec | None:
    """What the answer must match; None for anything. Raises ApiError (400), naming the field at fault.

    `special_tokens` (text to id) are looked for in structural tags.
    """
    asked = {name: spec for name, spec in _asked(fields, special_tokens, style) if spec is not None}
    if len(asked) > 1:
        names = " and ".join(f"`{name}`" for name in asked)
        message = f"{names} each say what the answer must match; send one of them."
        raise errors.invalid_value(list(asked)[1], message)
    if fields.guided_whitespace_pattern is not None and fields.guided_json is None:
        message = "`guided_whitespace_pattern` has an effect only together with `guided_json`."
        raise errors.invalid_value("guided_whitespace_pattern", message)
    return next(iter(asked.values()), None)


def _asked(
    fields: SamplingFields, special: Mapping[str, int], style: JSONStyle
) -> Iterator[tuple[str, GrammarSpec | None]]:
    if fields.response_format is not None:
        yield "response_format", _of_response_format(fields.response_format, special, style)
    if fields.structured_outputs is not None:
        yield "structured_outputs", _of_structured_outputs(fields.structured_outputs, special, style)
    if fields.guided_json is not None:
        own = _with_blanks(style, fields.guided_whitespace_pattern, "guided_whitespace_pattern")
        yield "guided_json", _schema(fields.guided_json, "guided_json", own)
    if fields.json_schema is not None:
        yield "json_schema", _schema(fields.json_schema, "json_schema", style)
    if fields.guided_choice is not None:
        yield "guided_choice", choice_grammar(fields.guided_choice, "guided_choice")
    if fields.guided_regex is not None:
        yield "guided_regex", _text("regex", fields.guided_regex, "guided_regex")
    if fields.regex is not None:
        yield "regex", _text("regex", fields.regex, "regex")
    if fields.guided_grammar is not None:
        yield "guided_grammar", _text("grammar", fields.guided_grammar, "guided_grammar")
    if fields.grammar is not None:
        yield "grammar", _text("grammar", fields.grammar, "grammar")
    if fields.ebnf is not None:
        yield "ebnf", _text("grammar", fields.ebnf, "ebnf")
    if fields.structural_tag is not None:
        yield "structural_tag", _tags(fields.structural_tag, "structural_tag", special)


def _of_response_format(value: dict[str, Any], special: Mapping[str, int], style: JSONStyle) -> GrammarSpec | None:
    path = "response_format"
    format = _read(value, ResponseFormat, path)
    if format.type not in _FITTING:
        guess = errors.nearest(format.type, _FITTING)
        hint = f" Did you mean `{guess}`?" if guess else ""
        message = f"`{path}.type` is {errors.quoted(format.type)}; known are {', '.join(_FITTING)}.{hint}"
        raise errors.invalid_value(f"{path}.type", message)
    for name in ("json_schema", "schema", "structures", "triggers", "format"):
        if name not in _FITTING[format.type] and getattr(format, name) is not None:
            message = f"`{path}.{name}` has no effect with the type {errors.quoted(format.type)}."
            raise errors.invalid_value(f"{path}.{name}", message)
    match format.type:
        case "text":
            return None
        case "structural_tag":
            return structural_tag_grammar(value, path, special)
        case "json_object":
            return _object(format.schema, path if format.schema is None else f"{path}.schema", style)
    wrapped = format.json_schema
    schema = format.schema if wrapped is None else wrapped.schema
    if schema is None:
        raise errors.missing_field(f"{path}.json_schema.schema", "it says what the answer must match.")
    return _schema(schema, f"{path}.schema" if wrapped is None else f"{path}.json_schema.schema", style)


_FITTING: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema"),
    "structural_tag": ("structures", "triggers", "format"),
}
"""The types of `response_format`, and what each of them takes."""


def _of_structured_outputs(value: dict[str, Any], special: Mapping[str, int], style: JSONStyle) -> GrammarSpec:
    path = "structured_outputs"
    asked = _read({name: item for name, item in value.items() if not name.startswith("_")}, StructuredOutputs, path)
    style = _with_blanks(style, asked.whitespace_pattern, f"{path}.whitespace_pattern")
    if asked.disable_any_whitespace is not None:
        if asked.disable_any_whitespace and asked.whitespace_pattern:
            message = f"`{path}` has both `whitespace_pattern` and `disable_any_whitespace`; send one of them."
            raise errors.invalid_value(f"{path}.whitespace_pattern", message)
        style = JSONStyle("" if asked.disable_any_whitespace else style.blanks or BLANKS, style.closed)
    if asked.disable_additional_properties is not None:
        style = JSONStyle(style.blanks, asked.disable_additional_properties)
    given = [name for name in _KINDS if _asks(name, asked)]
    if len(given) != 1:
        found = f"it has {' and '.join(f'`{name}`' for name in given)}" if given else "it has none"
        raise errors.invalid_value(path, f"`{path}` must have exactly one of {', '.join(_KINDS)}, but {found}.")
    field = f"{path}.{given[0]}"
    if asked.json_ is not None:
        return _schema(asked.json_, field, style)
    if asked.regex is not None:
        return _text("regex", asked.regex, field)
    if asked.choice is not None:
        return choice_grammar(asked.choice, field)
    if asked.grammar is not None:
        return _text("grammar", asked.grammar, field)
    if asked.structural_tag is not None:
        return _tags(asked.structural_tag, field, special)
    return _object(None, field, style)


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _asks(name: str, asked: StructuredOutputs) -> bool:
    """`json_object` false asks for nothing. What is empty asks too, and is refused: else the answer would be free."""
    value = asked.json_ if name == "json" else getattr(asked, name)
    return value is not None and value is not False


def _read(value: object, type: type[T], path: str) -> T:
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        field = path + place.rstrip("`")
        raise errors.invalid_value(field, f"`{field}` is not valid: {problem}.") from None


def schema_of(schema: AnySchema, field: str) -> object:
    """A schema, or its text, as a schema. Raises ApiError (400)."""
    if not isinstance(schema, str):
        return schema
    check_size(schema, field)
    try:
        read = msgspec.json.decode(schema)
        check_number_texts(schema, field)
    except (msgspec.DecodeError, RecursionError) as error:
        raise errors.invalid_value(field, f"`{field}` is a string that is not JSON: {error}") from None
    return read


def _schema(schema: AnySchema, field: str, style: JSONStyle) -> GrammarSpec:
    return _styled(schema_of(schema, field), field, style)


def _object(schema: AnySchema | None, field: str, style: JSONStyle) -> GrammarSpec:
    """Any JSON object; with a schema one that it allows."""
    read = {} if schema is None else schema_of(schema, field)
    return _styled({"type": "object", **read} if isinstance(read, Mapping) else read, field, style)


def _styled(schema: object, field: str, style: JSONStyle) -> GrammarSpec:
    check_depth(schema, field)
    if style.closed and isinstance(schema, Mapping):
        schema = changed(schema, _closed)
    return json_schema_grammar(schema, field, blanks=style.blanks)


def _text(kind: Any, text: str, field: str) -> GrammarSpec:
    """Raises ApiError (400) for a text that is too long, or empty, which would match nothing but an empty answer."""
    if not text:
        raise errors.invalid_value(field, f"`{field}` is empty; leave it out where the answer may be anything.")
    check_size(text, field)
    return GrammarSpec(kind=kind, text=text, field=field)


def choice_grammar(choice: Sequence[str], field: str) -> GrammarSpec:
    """One of these texts. Raises ApiError (400)."""
    if len(choice) > MAX_CHOICES:
        message = f"`{field}` has {len(choice):,} texts; at most {MAX_CHOICES:,} are allowed."
        raise errors.invalid_value(field, message)
    if not any(choice):
        found = "only empty ones" if choice else "none"
        raise errors.invalid_value(field, f"`{field}` must have a text that is not empty, but it has {found}.")
    return _text("choice", msgspec.json.encode(list(dict.fromkeys(choice))).decode(), field)


def _tags(tag: str | dict[str, Any], field: str, special: Mapping[str, int]) -> GrammarSpec:
    read = schema_of(tag, field)
    if not isinstance(read, Mapping):
        raise errors.invalid_value(field, f"`{field}` must be an object.")
    return structural_tag_grammar(read, field, special)


def _with_blanks(style: JSONStyle, pattern: str | None, field: str) -> JSONStyle:
    if pattern is None:
        return style
    if len(pattern) > MAX_BLANKS_CHARS:
        message = f"`{field}` has {len(pattern):,} characters; at most {MAX_BLANKS_CHARS:,} are allowed."
        raise errors.invalid_value(field, message)
    if not _BLANKS.fullmatch(pattern):
        message = f"`{field}` is {errors.quoted(pattern)}; between the tokens of JSON only blanks may stand."
        hint = " Write it of spaces, `\\n`, `\\t`, `\\r`, `\\s`, groups, sets, `|` and repetitions."
        raise errors.invalid_value(field, message + hint)
    return JSONStyle(_ANY_SPACE.sub(_json_space, pattern), style.closed)


_BLANKS = re.compile(r"(?:[ \n\t\r]|\\[ntrs]|\[(?:[ \n\t\r]|\\[ntrs])+\]|\(\?:|[()|*+?]|\{\d+(?:,\d*)?\})*")
_ANY_SPACE = re.compile(r"(?P<set>\[[^]]*\])|\\s")


def _json_space(found: re.Match[str]) -> str:
    """`\\s`, also in a set, without what JSON does not take for a blank."""
    spaces = r" \n\t\r"
    return f"[{spaces}]" if found["set"] is None else found["set"].replace(r"\s", spaces)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """No other properties than those that are named, unless the schema says something of them."""
    if "properties" not in schema or "additionalProperties" in schema:
        return schema
    return {**schema, "additionalProperties": False}
