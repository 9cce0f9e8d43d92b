"""From what a text must match to the grammar that the engine enforces: JSON by a schema, tagged JSON within free text.

    json_schema_grammar({"type": "integer"}, "guided_json")
    tagged_grammar([Tag("<call>", {"type": "object"}, "</call>")], triggers=["<call>"], field="tools")

Blanks are bounded here, by a pattern that the grammar library applies once where JSON allows any number of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.protocol import errors
from headrace.protocol.ipc import GrammarSpec

BLANKS = r" |\r?\n[ \t]{0,20}"
"""Between the tokens of JSON: nothing, one space, or a new line with its indentation."""
MAX_GRAMMAR_CHARS = 1 << 20
MAX_SCHEMA_DEPTH = 96
"""Levels of brackets. The grammar library gives up at 128; a few are ours."""

_OPTIONS = "x-guidance"
"""The grammar library reads its options under this key of a schema."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Tag:
    """`begin`, JSON that `schema` allows, `end`: such as a tool call in a model's own format."""

    begin: str
    schema: object
    end: str = ""


def json_schema_grammar(schema: object, field: str, *, blanks: str = BLANKS, after: Sequence[int] = ()) -> GrammarSpec:
    """JSON that `schema` (an object, or true for any JSON) allows. `blanks` is a regular expression, "" for none.

    `field` names the request's field in errors; `after` as in `GrammarSpec.after_token_ids`. Raises ApiError (400).
    """
    return GrammarSpec(
        kind="json_schema", text=schema_text(schema, field, blanks), field=field, after_token_ids=tuple(after)
    )


def tagged_grammar(
    tags: Sequence[Tag],
    *,
    triggers: Sequence[str],
    field: str,
    at_least_one: bool = False,
    at_most_one: bool = False,
    free_text: bool = True,
    separator: str = "",
    special_tokens: Mapping[str, int] | None = None,
    blanks: str = BLANKS,
    after: Sequence[int] = (),
) -> GrammarSpec:
    """Free text in which whatever begins like a trigger must go on as one of the tags.

    Every tag begins with one of `triggers`. After a tag comes text again, and perhaps another tag; with `at_most_one`
    the text ends with it. Without `free_text` there is nothing but tags, `separator` between them. `special_tokens`
    (text to id) are found in what is literal and demanded as the tokens that they are. Raises ApiError (400).
    """
    special = special_tokens or {}
    if free_text:
        left = [tag.begin for tag in tags if not tag.begin.startswith(tuple(triggers))]
        if left:
            message = f"the tag of `{field}` that begins {errors.quoted(left[0])} begins with none of the triggers."
            raise errors.invalid_value(field, message)
    rules, calls = [], []
    for place, trigger in enumerate(triggers if free_text else [""]):
        own = [tag for tag in tags if tag.begin.startswith(trigger)]
        if not own:
            raise errors.invalid_value(field, f"no tag of `{field}` begins with the trigger {errors.quoted(trigger)}.")
        call = f"call_{place}"
        calls.append(call)
        head = ""
        if free_text:
            first, *rest = _pieces(trigger, special)
            opening = f"TEXT {_piece(first, special)}"
            if first not in special:
                rules.append(f"head_{place}[lazy]: {opening}")
                opening = f"head_{place}"
            head = " ".join([opening, *(_piece(piece, special) for piece in rest)])
        rules.append(f"{call}: {head} ({' | '.join(f'tag_{place}_{n}' for n in range(len(own)))})")
        for n, tag in enumerate(own):
            begin, end = _literal(tag.begin[len(trigger) :], special), _literal(tag.end, special)
            rules.append(f"tag_{place}_{n}: {begin} %json {schema_text(tag.schema, field, blanks)} {end}")
    call = f"({' | '.join(calls)})"
    several = f"{call} ({_literal(separator, special)} {call})*"
    match free_text, at_most_one:
        case True, False:
            start = f"{call}{'+' if at_least_one else '*'} text"
        case True, True:
            start = call if at_least_one else f"{call} | text"
        case _:
            some = call if at_most_one else several
            start = some if at_least_one else f"({some})?"
    free = ["text: TEXT", r"TEXT: /(.|\n)*/"] if free_text else []
    return lark_grammar("\n".join(["%llguidance {}", f"start: {start}", *free, *rules]), field, after=after)


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
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        message = f"the schema in `{field}` is nested more than {MAX_SCHEMA_DEPTH} levels deep."
        raise errors.invalid_value(field, message)
    options = {"whitespace_pattern": blanks} if blanks else {"whitespace_flexible": False}
    text = _encode({**schema, _OPTIONS: options}).decode()
    check_size(text, field)
    return text


def check_size(text: str, field: str) -> None:
    """Raises ApiError (400) for a grammar that is too long to be tried."""
    if len(text) > MAX_GRAMMAR_CHARS:
        message = f"`{field}` has {len(text):,} characters; at most {MAX_GRAMMAR_CHARS:,} are allowed."
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


def _literal(text: str, special: Mapping[str, int]) -> str:
    """The text as terms of a rule; "" for no text."""
    return " ".join(_piece(piece, special) for piece in _pieces(text, special))


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
