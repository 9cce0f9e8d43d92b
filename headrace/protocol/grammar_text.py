"""From what a text must match to the grammar that the engine enforces: JSON by a schema, tagged JSON within free text.

    json_schema_grammar({"type": "integer"}, "guided_json")
    rules = LarkRules("tools", {})
    start = rules.triggered([("<call>", rules.json({}))], ["<call>"], at_least_one=True, at_most_one=False)
    lark_grammar(rules.grammar(start), "tools")

Blanks are bounded here, by a pattern that the grammar library applies once where JSON allows any number of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.protocol import errors
from headrace.protocol.ipc import GrammarSpec
from headrace.protocol.schema_numbers import with_kept_numbers

BLANKS = r" |\n(?: {0,16}|\t{0,6})"
"""Between the tokens of JSON: nothing, one space, or a new line with its indentation."""
MAX_GRAMMAR_CHARS = 1 << 20
MAX_SCHEMA_DEPTH = 96
"""Levels of brackets. The grammar library gives up at 128; a few are ours."""

_OPTIONS = "x-guidance"
"""The grammar library reads its options under this key of a schema."""
_encode = msgspec.json.Encoder().encode


def json_schema_grammar(schema: object, field: str, *, blanks: str = BLANKS, after: Sequence[int] = ()) -> GrammarSpec:
    """JSON that `schema` (an object, or true for any JSON) allows. `blanks` is a regular expression, "" for none.

    `field` names the request's field in errors; `after` as in `GrammarSpec.after_token_ids`. Raises ApiError (400).
    """
    return GrammarSpec(
        kind="json_schema", text=schema_text(schema, field, blanks), field=field, after_token_ids=tuple(after)
    )


class LarkRules:
    """Writes a grammar: each method gives an expression, and keeps the rules that it refers to."""

    def __init__(self, field: str, special_tokens: Mapping[str, int], blanks: str = BLANKS) -> None:
        self._field = field
        self._special = special_tokens
        self._blanks = blanks
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", r"TEXT: /(.|\n)*/", *self._rules])

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """A rule's name. One that is `lazy` ends where it first can."""
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def join(self, *expressions: str) -> str:
        return " ".join(expression for expression in expressions if expression)

    def either(self, expressions: Iterable[str]) -> str:
        return "(" + " | ".join(expression or '""' for expression in expressions) + ")"

    def text(self) -> str:
        """Any text. Nothing but tags may follow: text would swallow what else is to come."""
        return self.rule("TEXT")

    def text_until(self, end: str) -> str:
        """Any text up to `end`, and `end`."""
        first, *rest = _pieces(end, self._special)
        start = f"TEXT {_piece(first, self._special)}"
        opening = start if first in self._special else self.rule(start, lazy=True)
        return self.join(opening, *(_piece(piece, self._special) for piece in rest))

    def json(self, schema: object, field: str | None = None) -> str:
        """JSON that the schema allows. `field` names the schema's place in the request, for errors: in a comment."""
        text = schema_text(schema, field or self._field, self._blanks)
        if field is not None:
            self._rules.append(f"// {field}")
        return self.rule("%json " + text)

    def literal(self, text: str) -> str:
        return " ".join(_piece(piece, self._special) for piece in _pieces(text, self._special))

    def triggered(
        self, tags: Sequence[tuple[str, str]], triggers: Sequence[str], *, at_least_one: bool, at_most_one: bool
    ) -> str:
        """Free text; what begins like a trigger goes on as a tag (its beginning, then an expression)."""
        stray = [begin for begin, _ in tags if not begin.startswith(tuple(triggers))]
        if stray or not tags:
            found = f"{errors.quoted(stray[0])} begins with none of them" if stray else "there are no tags"
            raise errors.invalid_value(self._field, f"`{self._field}` has triggers, but {found}.")
        calls = []
        for trigger in triggers:
            own = [(begin[len(trigger) :], rest) for begin, rest in tags if begin.startswith(trigger)]
            if not trigger or not own:
                message = f"the trigger {errors.quoted(trigger)} of `{self._field}` begins none of the tags."
                raise errors.invalid_value(self._field, message)
            ends = self.either(self.join(self.literal(begin), rest) for begin, rest in own)
            calls.append(self.rule(self.join(self.text_until(trigger), ends)))
        call = self.either(calls)
        if not at_most_one:
            return f"{call}{'+' if at_least_one else '*'} {self.text()}"
        return call if at_least_one else f"({call} | {self.text()})"

    def separated(
        self, tags: Sequence[tuple[str, str]], separator: str, *, at_least_one: bool, at_most_one: bool
    ) -> str:
        """Nothing but tags, with `separator` between them."""
        if not tags:
            raise errors.invalid_value(self._field, f"`{self._field}` has no tags.")
        tag = self.either(self.join(self.literal(begin), rest) for begin, rest in tags)
        some = tag if at_most_one else f"{tag} ({self.join(self.literal(separator), tag)})*"
        return some if at_least_one else f"({some})?"


def lark_grammar(text: str, field: str, *, after: Sequence[int] = ()) -> GrammarSpec:
    """A grammar in the library's own language, which is Lark with `%json {schema}` and `<[token id]>`."""
    check_size(text, field)
    return GrammarSpec(kind="lark", text=text, field=field, after_token_ids=tuple(after))


def schema_text(schema: object, field: str, blanks: str = BLANKS) -> str:
    """The schema as JSON with our options. Raises ApiError (400) for what is no schema, too deep or too long."""
    if schema is True:
        schema = {}
    if schema is False:
        raise errors.invalid_value(field, f"`{field}` is the schema false, which no JSON satisfies.")
    if not isinstance(schema, Mapping):
        raise errors.invalid_value(field, f"`{field}` must be a JSON Schema: an object, or true for any JSON.")
    check_depth(schema, field)
    options = {"whitespace_pattern": blanks} if blanks else {"whitespace_flexible": False}
    text = _encode({**changed(with_kept_numbers(schema, field), _with_real_dates), _OPTIONS: options}).decode()
    check_size(text, field)
    return text


def changed(schema: Mapping[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The schema with `change` made to it and to every schema inside, innermost first."""

    def inside(value: object) -> object:
        if isinstance(value, Mapping):
            return changed(value, change)
        return [inside(item) for item in value] if isinstance(value, list) else value

    own: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _BY_NAME and isinstance(value, Mapping):
            own[keyword] = {name: inside(item) for name, item in value.items()}
        else:
            own[keyword] = value if keyword in _VALUES else inside(value)
    return change(own)


_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas, whatever they look like."""

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LONG_MONTHS, _SHORT_MONTHS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_MONTH_AND_DAY = f"(?:{_LONG_MONTHS}|{_SHORT_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_DATES = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""The library's own let a 29th of February and a 60th second stand where there is none."""


def _with_real_dates(schema: dict[str, Any]) -> dict[str, Any]:
    pattern = _DATES.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is None or "pattern" in schema:
        return schema
    return {**{name: value for name, value in schema.items() if name != "format"}, "pattern": pattern}


def check_size(text: str, field: str) -> None:
    """Raises ApiError (400) for a grammar that is too long to be tried."""
    if len(text) > MAX_GRAMMAR_CHARS:
        message = f"`{field}` has {len(text):,} characters; at most {MAX_GRAMMAR_CHARS:,} are allowed."
        raise errors.invalid_value(field, message)


def check_depth(value: object, field: str) -> None:
    """Raises ApiError (400) for what is nested too deeply to be worked on."""
    if _depth(value) > MAX_SCHEMA_DEPTH:
        message = f"`{field}` is nested more than {MAX_SCHEMA_DEPTH} levels deep."
        raise errors.invalid_value(field, message)


def _depth(value: object) -> int:
    """Levels of objects and lists, counted without recursion."""
    deepest = 0
    level: list[object] = [value]
    while level and deepest <= MAX_SCHEMA_DEPTH:
        deepest += 1
        inner: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        level = [item for item in inner if isinstance(item, Mapping | list | tuple)]
    return deepest


def _pieces(text: str, special: Mapping[str, int]) -> list[str]:
    """The text cut at its special tokens, which are pieces of their own."""
    if not special:
        return [text] if text else []
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    return [piece for piece in re.split(f"({names})", text) if piece]


def _piece(piece: str, special: Mapping[str, int]) -> str:
    return f"<[{special[piece]}]>" if piece in special else _quoted(piece)


def _quoted(text: str) -> str:
    return _encode(text).decode()
