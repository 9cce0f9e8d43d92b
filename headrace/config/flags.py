"""What a flag is: its names, how its text becomes a value, and whether it is real, mapped or refused.

The rows stand in `flag_table` and `flag_table_compat`. A flag we know is never ignored: it has its effect
(real), prints one line saying what it maps to (mapped), or stops the start naming what is missing (refused).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, Overflow
from typing import Literal

Kind = Literal["text", "switch", "int", "float", "tokens", "tokens or auto", "bytes", "json", "text or json", "list"]
State = Literal["real", "mapped", "refused"]

_LARGEST = 2**63 - 1
_SUFFIXES = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the table. `name` and `aliases` are without leading dashes.

    `note` says what a mapped flag maps to, or names the feature a refused flag asks for. `harmless` are the
    values of a mapped or refused flag that ask for nothing. `same` maps accepted spellings to the value meant.
    """

    name: str
    kind: Kind
    help: str
    group: str
    default: object = None
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    many: bool = False
    """Takes one or more values, `--served-model-name a b`."""
    minimum: float | None = None
    maximum: float | None = None
    example: str = ""
    state: State = "real"
    note: str = ""
    instead: str = ""
    """For a refused flag: what does work today."""
    harmless: tuple[object, ...] = ()
    same: tuple[tuple[str, str], ...] = ()

    @property
    def option(self) -> str:
        return f"--{self.name}"

    @property
    def spellings(self) -> list[str]:
        """Every way to write it with its dashes: two-letter aliases such as `tp` take one dash."""
        return [self.option, *(f"-{a}" if is_short(a) else f"--{a}" for a in self.aliases)]

    @property
    def takes_json(self) -> bool:
        """Whether it takes an object, whose values can be given one by one too: `--hf-overrides.rope_theta 1e6`."""
        return self.kind in ("json", "text or json")

    @property
    def metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        words = {"text": "TEXT", "int": "N", "float": "X", "tokens": "N", "tokens or auto": "N|auto", "bytes": "BYTES"}
        word = words.get(
            self.kind, {"json": "JSON", "text or json": "TEXT|JSON", "list": "LIST", "switch": ""}.get(self.kind, "")
        )
        return f"{word} ..." if self.many else word

    def is_harmless(self, value: object) -> bool:
        """True when `value` asks for nothing: the flag's default or one of the listed values."""
        if self.kind == "switch":
            return value is False or value in self.harmless
        return value in self.harmless or (self.default is not None and value == self.default)

    def parse(self, text: str) -> object:
        """The value that `text` means. ValueError says what is allowed, without the flag's name."""
        text = text if self.kind == "text" and not self.choices else text.strip()
        value = _PARSERS[self.kind](text)
        if self.choices and isinstance(value, str):
            return self._choose(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._check_bounds(value)
        return value

    def _choose(self, value: str) -> str:
        meant = dict(self.same).get(value.lower(), value)
        for choice in self.choices:
            if meant.lower() == choice.lower():
                return choice
        near = closest(value, [*self.choices, *dict(self.same)])
        raise ValueError(f"choose one of {', '.join(self.choices)}" + (f" (did you mean {near}?)" if near else ""))

    def _check_bounds(self, value: float) -> None:
        low, high = self.minimum, self.maximum
        if (low is None or value >= low) and (high is None or value <= high):
            return
        if low is not None and high is not None:
            raise ValueError(f"must be between {low:g} and {high:g}")
        raise ValueError(f"must be {low:g} or more" if low is not None else f"must be {high:g} or less")


def is_short(name: str) -> bool:
    return len(name) <= 3


def canonical(name: str) -> str:
    """`--max_model_len` and `max-model-len` are one name; dots of nested JSON keys stay as they are."""
    return name.lstrip("-").replace("_", "-")


def by_name(flags: Iterable[Flag]) -> dict[str, Flag]:
    """Every name and alias, without dashes, to its flag. ValueError when two flags share one."""
    index: dict[str, Flag] = {}
    for flag in flags:
        for name in (flag.name, *flag.aliases):
            if name in index:
                raise ValueError(f"two flags are called {name}")
            index[name] = flag
    return index


def closest(word: str, names: Iterable[str]) -> str | None:
    """The name most like `word`, or None when nothing is alike."""
    lowered = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def _parse_text(text: str) -> object:
    return text


def _parse_switch(text: str) -> object:
    word = text.lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ValueError("say true or false, or leave the value out")


def _parse_int(text: str) -> object:
    try:
        value = int(text)
    except ValueError:
        raise ValueError("not a whole number") from None
    return _within_64_bits(value)


def _parse_float(text: str) -> object:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("not a finite number")
    return value


def _parse_count(text: str) -> object:
    """`8192`, `8k` (8,000), `8K` (8,192), `1.5G`: a small letter counts in thousands, a capital in 1,024s."""
    body, factor = text.replace(",", ""), 1
    for ending in ("iB", "B"):
        if body.endswith(ending):
            body = body.removesuffix(ending)
            body = body[:-1] + body[-1:].upper() if ending == "iB" else body
            break
    if body[-1:] in _SUFFIXES:
        body, factor = body[:-1], _SUFFIXES[body[-1]]
    try:
        value = Decimal(body) * factor
    except Overflow:
        raise ValueError("larger than any machine holds") from None
    except InvalidOperation:
        raise ValueError("not a size; write 8192, 8k (8,000) or 8K (8,192)") from None
    if not value.is_finite() or abs(value) > _LARGEST:
        raise ValueError("larger than any machine holds")
    if value != int(value):
        raise ValueError("not a whole number")
    return int(value)


def _within_64_bits(value: int) -> int:
    """Settings travel between processes in 64 bits."""
    if abs(value) > _LARGEST:
        raise ValueError("larger than any machine holds")
    return value


def _parse_count_or_auto(text: str) -> object:
    return "auto" if text.lower() in ("auto", "-1") else _parse_count(text)


def _parse_json(text: str) -> object:
    try:
        value = json.loads(text, object_pairs_hook=distinct)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error}); write it in single quotes, such as '{{\"key\": 1}}'") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object, such as '{\"key\": 1}'")
    return value


def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object whose keys all differ. ValueError names one that does not."""
    table: dict[str, object] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {key} stands twice in one object")
        table[key] = value
    return table


def _parse_text_or_json(text: str) -> object:
    return _parse_json(text) if text.startswith("{") else text


def _parse_list(text: str) -> object:
    """`'["a", "b"]'` as vLLM writes lists, or plain `a` and `a,b`."""
    if not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a valid JSON list ({error})") from None
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise ValueError("must be a JSON list of strings, such as '[\"*\"]'")
    return value


_PARSERS: dict[Kind, Callable[[str], object]] = {
    "text": _parse_text,
    "switch": _parse_switch,
    "int": _parse_int,
    "float": _parse_float,
    "tokens": _parse_count,
    "tokens or auto": _parse_count_or_auto,
    "bytes": _parse_count,
    "json": _parse_json,
    "text or json": _parse_text_or_json,
    "list": _parse_list,
}
