"""Typed reading of one table of a configuration file, collecting every complaint instead of stopping at the first.

A Section reads keys by name and type, and at `finish` complains of those nobody asked for. A complaint names the
place, the key, what was found and what is allowed. What was found is quoted as it is written, so a value that came
from `${...}` is never shown, and the value of a secret not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeVar

from headrace.gateway.config_document import Document, Key
from headrace.gateway.placeholders import Placeholders
from headrace.protocol.errors import nearest

T = TypeVar("T")
MAX_QUOTED_CHARS = 60


@dataclass(slots=True)
class Problems:
    """What is wrong with a file, in the order it was found; warnings do not stop a start."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    strict: bool = True

    def error(self, place: str, text: str) -> None:
        self.errors.append(f"{place}: {text}")

    def warn(self, place: str, text: str) -> None:
        self.warnings.append(f"{place}: {text}")

    def unknown(self, place: str, text: str) -> None:
        """An error, or with `strict = false` a warning."""
        (self.errors if self.strict else self.warnings).append(f"{place}: {text}")


def dotted(key: Key) -> str:
    """upstreams.local.base_url, routing.rules[0].match."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def shown(value: object) -> str:
    """A found value for a message, shortened."""
    if isinstance(value, Decimal):
        text = str(value)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, Mapping):
        text = "a table"
    elif isinstance(value, list):
        text = "a list"
    else:
        text = str(value)
    return text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 3] + "..."


class Section:
    """One table. A reader returns None for an absent value and for a wrong one, of which it complains."""

    def __init__(
        self, document: Document, key: Key, table: Mapping[str, Any], problems: Problems, placeholders: Placeholders
    ) -> None:
        self.document = document
        self.key = key
        self.table = table
        self.problems = problems
        self.placeholders = placeholders
        self.read: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.table

    def place(self, *names: str | int) -> str:
        return self.document.place((*self.key, *names))

    def complain(self, name: str | int | None, text: str) -> None:
        """`headrace.toml:7: upstreams.local.port <text>`; `name` None means the section itself."""
        key = self.key if name is None else (*self.key, name)
        self.problems.error(self.document.place(key), f"{dotted(key)} {text}".strip())

    def warn(self, name: str | None, text: str) -> None:
        key = self.key if name is None else (*self.key, name)
        self.problems.warn(self.document.place(key), f"{dotted(key)} {text}".strip())

    def raw(self, name: str) -> Any:
        self.read.append(name)
        return self.table.get(name)

    def text(self, name: str, *, secret: bool = False) -> str | None:
        """A string with its placeholders filled and blanks around it removed."""
        return self._text(name, self.raw(name), secret)

    def _text(self, name: str | int, value: object, secret: bool = False) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str):
            found = "something else" if secret else shown(value)
            self.complain(name, f"must be text, but it is {found}.")
            return None
        try:
            filled = self.placeholders.fill(value).strip()
        except ValueError as error:
            self.complain(name, f"{error}.")
            return None
        if not filled and secret and value.strip().endswith(":-}"):
            return None  # `${KEY:-}`: a key, or none
        if not filled:
            self.complain(name, "is empty; give it a value or leave the line out.")
            return None
        return filled

    def choice(self, name: str, choices: tuple[str, ...]) -> str | None:
        value = self.text(name)
        if value is None or value in choices:
            return value
        near = nearest(value, choices)
        hint = f" Did you mean {near}?" if near else ""
        self.complain(name, f"is {shown(self.table[name])}; choose one of {', '.join(choices)}.{hint}")
        return None

    def flag(self, name: str) -> bool | None:
        value = self._filled(name)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value is None or isinstance(value, bool):
            return value
        self.complain(name, f"must be true or false, but it is {shown(self.table[name])}.")
        return None

    def integer(self, name: str, low: int = 1, high: int = 2**53) -> int | None:
        value = self._number(name)
        if value is None:
            return None
        if value == value.to_integral_value() and low <= value <= high:
            return int(value)
        self.complain(name, f"must be a whole number from {low} to {high:,}, but it is {shown(self.table[name])}.")
        return None

    def seconds(self, name: str, low: float = 0.001, high: float = 86400.0) -> float | None:
        return self.number(name, low, high, " seconds")

    def number(self, name: str, low: float, high: float, unit: str = "") -> float | None:
        value = self._number(name)
        if value is None:
            return None
        if low <= value <= high:
            return float(value)
        self.complain(name, f"must be {low:g} to {high:g}{unit}, but it is {shown(self.table[name])}.")
        return None

    def money(self, name: str) -> int | None:
        """An amount of the currency as micro-units, exactly."""
        value = self._number(name)
        if value is None:
            return None
        micros = value * 1_000_000
        if 0 <= micros <= 2**62 and micros == micros.to_integral_value():
            return int(micros)
        self.complain(name, f"must be an amount of 0 or more with at most 6 decimals, not {shown(self.table[name])}.")
        return None

    def _filled(self, name: str) -> object:
        """The value; a string with its placeholders filled, so that port = "${PORT:-8080}" works."""
        value = self.raw(name)
        return self._text(name, value) if isinstance(value, str) and "${" in value else value

    def _number(self, name: str) -> Decimal | None:
        value = self._filled(name)
        if value is None:
            return None
        written = self.table[name]
        if isinstance(value, str) and value is not written:
            try:
                value = Decimal(value)
            except ArithmeticError:
                value = written
        if isinstance(value, int | Decimal) and not isinstance(value, bool) and Decimal(value).is_finite():
            return Decimal(value)
        self.complain(name, f"must be a number, but it is {shown(written)}.")
        return None

    def names(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or one string."""
        value = self.raw(name)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        wrong = [item for item in items if not (isinstance(item, str) and item.strip())]
        if wrong:
            found = f"holds {shown(wrong[0])}" if isinstance(value, list) else f"is {shown(value)}"
            self.complain(name, f"must be a list of names, but it {found}.")
            return None
        texts = [self._text(name, item) for item in items]
        return tuple(dict.fromkeys(text for text in texts if text is not None))

    def section(self, name: str) -> Section | None:
        """The table below `name`."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.complain(name, f"must be a table, but it is {shown(value)}.")
            return None
        return Section(self.document, (*self.key, name), value, self.problems, self.placeholders)

    def sections(self, name: str) -> Iterator[tuple[str, Section]]:
        """(name, table) of each entry of a table of tables."""
        outer = self.section(name)
        for inner in outer.table if outer else ():
            if outer and not inner.strip():
                outer.complain(inner, "has no name; give it one.")
            below = outer.section(inner) if outer else None
            if below is not None:
                yield inner, below

    def items(self, name: str) -> Iterator[Section]:
        """Each table of a list of tables."""
        value = self.raw(name)
        if value is None:
            return
        if not isinstance(value, list):
            self.complain(name, f"must be a list of tables, but it is {shown(value)}.")
            return
        for place, item in enumerate(value):
            if isinstance(item, Mapping):
                yield Section(self.document, (*self.key, name, place), item, self.problems, self.placeholders)
            else:
                self.problems.error(
                    self.place(name, place), f"{dotted((*self.key, name, place))} must be a table, not {shown(item)}."
                )

    def parsed(self, name: str, parse: Callable[[Any], T]) -> T | None:
        """What `parse` makes of the value; its ValueError becomes a complaint."""
        value = self.raw(name)
        if value is None:
            return None
        try:
            return parse(value)
        except ValueError as error:
            self.complain(name, str(error))
            return None

    def finish(self, also: Iterable[str] = ()) -> None:
        """Complain of keys that were not read."""
        known = list(dict.fromkeys([*self.read, *also]))
        for name in self.table:
            if name not in known:
                near = nearest(name, known)
                hint = f"Did you mean {near}?" if near else f"Known here: {', '.join(known)}."
                key = (*self.key, name)
                self.problems.unknown(self.document.place(key), f"unknown key {dotted(key)}. {hint}")
