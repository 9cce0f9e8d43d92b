"""The rule language: from `match` as people write it to conditions, and whether they hold for a request.

    {"match": {"max_tokens": ">4096"}, "target": "cloud"}
    {"match": {"model": ["gpt-*", "o3"], "key.tag": "production"}, "target": "cloud"}

All lines of a `match` must hold. A value is a scalar (equal), a list (any of), a glob for names, or for numbers a
comparison `>`, `>=`, `<`, `<=`, `==`, `!=`. A value that the request does not have holds for nothing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from headrace.gateway.snapshot import Comparison, Condition, Rule
from headrace.protocol.errors import nearest

NUMBERS = ("max_tokens", "prompt_tokens", "total_tokens")
NAMES = ("model", "endpoint", "key.tag", "key.name")
SUBJECTS = (*NUMBERS, "stream", "tools", *NAMES, "header.<name>")

_COMPARISON = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([+-]?\d[\d_]*(?:\.\d+)?)\s*")
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_OPERATORS: dict[str, Literal["=", "!=", ">", ">=", "<", "<="]] = {
    "==": "=",
    "!=": "!=",
    ">": ">",
    ">=": ">=",
    "<": "<",
    "<=": "<=",
}


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What routing looks at. `prompt_tokens` is an estimate; `max_tokens` is the request's own, None when absent."""

    endpoint: str
    """chat, completions, messages, responses, embeddings, ..."""
    model: str | None = None
    max_tokens: int | None = None
    prompt_tokens: int = 0
    stream: bool = False
    num_tools: int = 0
    num_answers: int = 1
    """`n`, or `best_of` where that is more; for what is reserved, no rule looks at it."""
    key_name: str = ""
    key_tags: tuple[str, ...] = ()
    headers: Mapping[str, str] = {}
    """Names in lower case."""
    visible_models: tuple[str, ...] = ()
    """Globs of the models that the key may see, for the names in a 404; () = all."""


def parse_match(match: Mapping[str, object]) -> tuple[Condition, ...]:
    """Conditions of one rule. ValueError says what is wrong with the first mistake."""
    return tuple(parse_condition(subject, value) for subject, value in flattened(match))


def flattened(match: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """TOML's `key.tag = "x"` is a table {key: {tag: "x"}}; both spellings become ("key.tag", "x")."""
    for name, value in match.items():
        if isinstance(value, Mapping):
            for inner, below in value.items():
                yield f"{name}.{inner}", below
        else:
            yield name, value


def parse_condition(subject: str, value: object) -> Condition:
    """One line of a `match`. ValueError says what is wrong with it and what is allowed."""
    subject = {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens"}.get(subject, subject)
    if subject.startswith("header.") and len(subject) > len("header."):
        subject = subject.lower()
    elif subject not in SUBJECTS or subject == "header.<name>":
        near = nearest(subject, SUBJECTS)
        hint = f" Did you mean {near}?" if near else ""
        raise ValueError(f"a rule cannot look at {subject!r}.{hint} It can look at {', '.join(SUBJECTS)}.")
    values = value if isinstance(value, list | tuple) else [value]
    if not values:
        raise ValueError("an empty list matches nothing; leave the line out to match everything.")
    return Condition(subject=subject, tests=tuple(_test(subject, item) for item in values))


def _test(subject: str, value: object) -> Comparison:
    if isinstance(value, Decimal) and value.is_finite():
        value = int(value) if value == int(value) else float(value)
    if subject == "stream":
        if isinstance(value, bool):
            return Comparison("=", value)
        raise ValueError(f"must be true or false, but it is {value!r}.")
    if subject in NUMBERS or subject == "tools":
        return _number_test(subject, value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a name, a glob such as 'gpt-*', or a list of them, but it is {value!r}.")
    return Comparison("glob" if re.search(r"[*?\[]", value) else "=", value)


def _number_test(subject: str, value: object) -> Comparison:
    if subject == "tools" and isinstance(value, bool):
        return Comparison("=", value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Comparison("=", value)
    match = _COMPARISON.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        more = ", true or false" if subject == "tools" else ""
        raise ValueError(f"must be a number or a comparison such as '>4096' or '<= 100'{more}, but it is {value!r}.")
    digits = match[2].replace("_", "")
    return Comparison(_OPERATORS[match[1]], float(digits) if "." in digits else int(digits))


def matching_rule(rules: tuple[Rule, ...], facts: RequestFacts, model: str | None) -> Rule | None:
    """The first rule that holds. `model` is the requested name after aliases; rules may name either."""
    for rule in rules:
        if all(holds(condition, facts, model) for condition in rule.match):
            return rule
    return None


def holds(condition: Condition, facts: RequestFacts, model: str | None) -> bool:
    for value in _found(condition.subject, facts, model):
        for test in condition.tests:
            if _passes(test, value):
                return True
    return False


def _found(subject: str, facts: RequestFacts, model: str | None) -> tuple[object, ...]:
    """The request's values of a subject; () when it has none."""
    match subject:
        case "model":
            return tuple(dict.fromkeys(name for name in (model, facts.model) if name is not None))
        case "max_tokens":
            return () if facts.max_tokens is None else (facts.max_tokens,)
        case "prompt_tokens":
            return (facts.prompt_tokens,)
        case "total_tokens":
            return (facts.prompt_tokens + (facts.max_tokens or 0),)
        case "stream":
            return (facts.stream,)
        case "tools":
            return (facts.num_tools,)
        case "endpoint":
            return (facts.endpoint,)
        case "key.tag":
            return facts.key_tags
        case "key.name":
            return (facts.key_name,) if facts.key_name else ()
        case _:
            header = facts.headers.get(subject.removeprefix("header."))
            return () if header is None else (header,)


def _passes(test: Comparison, value: object) -> bool:
    if test.operator == "glob":
        return fnmatchcase(str(value), str(test.value))
    if isinstance(test.value, bool) and not isinstance(value, bool):
        return bool(value) is test.value
    return bool(_COMPARE[test.operator](value, test.value))
