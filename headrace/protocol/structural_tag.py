"""`structural_tag`: what an answer is made of, in vLLM's two spellings, as one grammar.

    {"structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], "triggers": ["<f"]}     free text with tags
    {"format": {"type": "sequence", "elements": [...]}}                                        built from formats

Formats: const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags, tags_with_separator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headrace.protocol import errors
from headrace.protocol.grammar_text import LarkRules, check_depth, lark_grammar
from headrace.protocol.ipc import GrammarSpec


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: bool | dict[str, Any]
    end: str = ""


class _Structures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"


class _Wrapped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, Any]
    type: Literal["structural_tag"] = "structural_tag"


class ConstString(msgspec.Struct, frozen=True, tag="const_string", forbid_unknown_fields=True):
    value: str


class JSONSchema(msgspec.Struct, frozen=True, tag="json_schema", forbid_unknown_fields=True):
    json_schema: bool | dict[str, Any]


class Regex(msgspec.Struct, frozen=True, tag="regex", forbid_unknown_fields=True):
    pattern: str


class AnyText(msgspec.Struct, frozen=True, tag="any_text", forbid_unknown_fields=True):
    pass


class Sequences(msgspec.Struct, frozen=True, tag="sequence", forbid_unknown_fields=True):
    elements: list[Format]


class Or(msgspec.Struct, frozen=True, tag="or", forbid_unknown_fields=True):
    elements: list[Format]


class TagFormat(msgspec.Struct, frozen=True, tag="tag", forbid_unknown_fields=True):
    begin: str
    content: Format
    end: str | list[str] = ""


class TriggeredTags(msgspec.Struct, frozen=True, tag="triggered_tags", forbid_unknown_fields=True):
    triggers: list[str]
    tags: list[TagFormat]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(msgspec.Struct, frozen=True, tag="tags_with_separator", forbid_unknown_fields=True):
    tags: list[TagFormat]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = ConstString | JSONSchema | Regex | AnyText | Sequences | Or | TagFormat | TriggeredTags | TagsWithSeparator


def structural_tag_grammar(
    value: Mapping[str, Any], field: str, special_tokens: Mapping[str, int] | None = None
) -> GrammarSpec:
    """`special_tokens` (text to id) are demanded as such where a literal holds them. Raises ApiError (400)."""
    check_depth(value, field)
    format: Format
    if "format" in value:
        format = _read(_read(dict(value), _Wrapped, field).format, Format, f"{field}.format")
    else:
        old = _read(dict(value), _Structures, field)
        tags = [TagFormat(one.begin, JSONSchema(one.schema), one.end) for one in old.structures]
        format = TriggeredTags(old.triggers, tags)
    rules = LarkRules(field, special_tokens or {})
    return lark_grammar(rules.grammar(_expression(format, rules, field, is_last=True)), field)


def _expression(format: Format, rules: LarkRules, field: str, *, is_last: bool) -> str:
    """`is_last`: nothing follows, so free text may."""
    match format:
        case ConstString():
            return rules.literal(format.value)
        case JSONSchema():
            return rules.json(format.json_schema)
        case Regex():
            if not format.pattern:
                raise errors.invalid_value(field, f"`{field}` has a regex whose `pattern` is empty.")
            return rules.rule(f"/{format.pattern.replace('/', chr(92) + '/')}/")
        case AnyText():
            _check_last(is_last, field, "any_text")
            return rules.text()
        case Sequences():
            last = len(format.elements) - 1
            parts = [
                _expression(one, rules, field, is_last=is_last and i == last) for i, one in enumerate(format.elements)
            ]
            return rules.join(*parts)
        case Or():
            return rules.either(_expression(one, rules, field, is_last=is_last) for one in format.elements)
        case TagFormat():
            return rules.join(rules.literal(format.begin), _inside(format, rules, field, is_last=is_last))
        case TriggeredTags():
            _check_last(is_last or (format.at_least_one and format.stop_after_first), field, "triggered_tags")
            return rules.triggered(
                [(tag.begin, _inside(tag, rules, field)) for tag in format.tags],
                format.triggers,
                at_least_one=format.at_least_one,
                at_most_one=format.stop_after_first,
            )
        case TagsWithSeparator():
            return rules.separated(
                [(tag.begin, _inside(tag, rules, field)) for tag in format.tags],
                format.separator,
                at_least_one=format.at_least_one,
                at_most_one=format.stop_after_first,
            )


def _inside(tag: TagFormat, rules: LarkRules, field: str, *, is_last: bool = False) -> str:
    """What follows a tag's beginning."""
    ends = [tag.end] if isinstance(tag.end, str) else tag.end
    if isinstance(tag.content, AnyText) and all(ends):
        return rules.either(rules.text_until(end) for end in ends)
    content = _expression(tag.content, rules, field, is_last=is_last and not any(ends))
    return rules.join(content, rules.literal(ends[0]) if len(ends) == 1 else rules.either(map(rules.literal, ends)))


def _check_last(is_last: bool, field: str, kind: str) -> None:
    if not is_last:
        message = f"`{field}`: {kind} may stand only at the end, or right inside a tag that has an end."
        raise errors.invalid_value(field, message)


def _read(value: object, type: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        at = path + place.rstrip("`")
        raise errors.invalid_value(at, f"`{at}` is not valid: {problem}.") from None
