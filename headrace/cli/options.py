"""Options of the commands that are not about the engine: `--name value`, `--name=value`, `--switch`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config.flags import closest


@dataclass(frozen=True, slots=True)
class Option:
    """`metavar` "" = a switch without a value. Bounds and choices are checked while parsing."""

    name: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    number: tuple[int, int] | None = None
    many: bool = False
    """May be given several times; the values are joined by commas."""


def parse_options(
    command: str, words: Sequence[str], options: Sequence[Option], usage: str, positionals: int = 0
) -> dict[str, str] | int:
    """The given options by name (a switch is "true"), positional words as "0", "1" ...; or the exit status.

    0 after --help, 2 after mistakes, which are all printed, one line each.
    """
    known = {option.name: option for option in options}
    found: dict[str, str] = {}
    mistakes: list[str] = []
    rest = list(words)
    num_positionals = 0
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            print(usage, end="")
            return 0
        if not word.startswith("-") or word == "-":
            if num_positionals < positionals:
                found[str(num_positionals)] = word
                num_positionals += 1
            else:
                mistakes.append(f"{word} is one word too many; `{command} --help` shows how it is used.")
            continue
        written, equals, inline = word.partition("=")
        option = known.get(written.lstrip("-").replace("_", "-")) if written.startswith("--") else None
        if option is None:
            near = closest(written.lstrip("-"), known)
            hint = f"Did you mean --{near}?" if near else f"`{command} --help` lists the options."
            mistakes.append(f"unknown option {written}. {hint}")
            if not equals and rest and not rest[0].startswith("-"):
                rest.pop(0)  # most likely its value
        elif not option.metavar:
            found[option.name] = "true"
        elif not equals and (not rest or rest[0].startswith("--")):
            mistakes.append(f"{written} needs a value: {written} {option.metavar}.")
        else:
            value = inline if equals else rest.pop(0)
            wrong = _mistake(option, value)
            if wrong:
                mistakes.append(f"{written} {value}: {wrong}.")
            if not value.strip():
                mistakes.append(f"{written} is empty; it needs a value: {written} {option.metavar}.")
            before = found.get(option.name)
            found[option.name] = f"{before},{value}" if option.many and before is not None else value
    for mistake in mistakes:
        print(f"{command}: {mistake}", file=sys.stderr)
    return 2 if mistakes else found


def _mistake(option: Option, value: str) -> str | None:
    if option.choices and value not in option.choices:
        return f"choose one of {', '.join(option.choices)}"
    if option.number is not None:
        low, high = option.number
        if not value.isdecimal() or not low <= int(value) <= high:
            return f"must be a whole number from {low} to {high}"
    return None
