"""A configuration file as data that remembers where each value stands.

TOML or JSON, by content where the name does not say. For TOML every key path has a line; for JSON a pointer. Numbers
with a fraction are Decimal, so that prices are exact.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from headrace.config.errors import ConfigError

Key = tuple[str | int, ...]
"""The way to a value: ("upstreams", "local", "base_url"), ("routing", "rules", 0)."""

# One lexeme: a comment, a string of either kind (long ones first), a bracket, the end of a line, a bare word.
_LEXEME = re.compile(
    r"#[^\n]*|\"\"\"(?:[^\\]|\\.)*?\"{3,5}|'''.*?'{3,5}|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[\[\]{}]|\n|=|,|\.|[^\s#\"'\[\]{}=,.]+",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Document:
    """`name` is how messages call the file; `lines` is empty for JSON."""

    path: Path
    name: str
    table: Mapping[str, Any]
    lines: Mapping[Key, int]
    is_toml: bool

    def place(self, key: Key) -> str:
        """`headrace.toml:12` or `providers.json /providers/local/base_url`."""
        if not self.is_toml:
            return f"{self.name} /" + "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in key)
        for length in range(len(key), 0, -1):
            if key[:length] in self.lines:
                return f"{self.name}:{self.lines[key[:length]]}"
        return self.name


def read_document(path: Path) -> Document:
    """Raises ConfigError naming the file, and the line and column of a mistake in its syntax."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8 text.") from None
    return parse_document(text, path)


def parse_document(text: str, path: Path) -> Document:
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        raise ConfigError(f"{path}: a gateway configuration is TOML or JSON, not YAML.")
    is_json = suffix == ".json" or (suffix != ".toml" and text.lstrip()[:1] == "{")
    return _json(text, path) if is_json else _toml(text, path)


def _json(text: str, path: Path) -> Document:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{path}: the key {twice!r} stands twice in one object; keep one.")
        return table

    try:
        table = json.loads(text, parse_float=Decimal, object_pairs_hook=distinct)
        json.dumps(table, ensure_ascii=False, default=str).encode()
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno}).") from None
    except UnicodeEncodeError:
        raise ConfigError(f"{path}: a string holds half of a surrogate pair (such as \\ud83d alone).") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{path}: nested too deeply, or a number is too long.") from None
    if not isinstance(table, dict):
        raise ConfigError(f'{path}: must be a JSON object, such as {{"providers": {{}}}}.')
    return Document(path, str(path), table, {}, False)


def _toml(text: str, path: Path) -> Document:
    try:
        table = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL)
        problem, line, column = found.groups() if found else (str(error), None, None)
        line = line or str(text.count("\n") + 1)
        where = f" (column {column})" if column else " (end of the file)"
        raise ConfigError(f"{path}:{line}: not valid TOML: {problem}{where}.") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{path}: nested too deeply, or a number is too long.") from None
    return Document(path, str(path), table, _toml_lines(text), True)


def _toml_lines(text: str) -> dict[Key, int]:
    """The line of every header and key of valid TOML; keys inside inline tables have their statement's line."""
    lines: dict[Key, int] = {}
    counts: dict[Key, int] = {}
    header: Key = ()
    for words, line in _statements(text):
        if words[0] == "[":
            is_array = words[1:2] == ["["]
            header = _resolved(_dotted([word for word in words if word not in "[]"]), counts)
            if is_array:
                place = counts.get(header, 0)
                counts[header] = place + 1
                lines.setdefault(header, line)
                header = (*header, place)
            for length in range(1, len(header) + 1):
                lines.setdefault(header[:length], line)
        elif "=" in words:
            key = (*header, *_dotted(words[: words.index("=")]))
            for length in range(len(header) + 1, len(key) + 1):
                lines.setdefault(key[:length], line)
    return lines


def _statements(text: str) -> Iterator[tuple[list[str], int]]:
    """(lexemes, number of the first line) of each statement; a value with open brackets goes on over lines."""
    words: list[str] = []
    start = line = 1
    depth = 0
    for match in _LEXEME.finditer(text):
        word = match[0]
        if word == "\n":
            line += 1
            if depth == 0 and words:
                yield words, start
                words = []
            continue
        if not word.startswith("#"):
            if not words:
                start = line
            words.append(word)
            depth += (word in ("[", "{")) - (word in ("]", "}"))
        line += word.count("\n")
    if words:
        yield words, start


def _dotted(words: list[str]) -> Key:
    """a . "b c" . d -> ("a", "b c", "d")."""
    return tuple(_unquoted(word) for word in words if word != ".")


def _unquoted(word: str) -> str:
    if word[0] == '"':
        return str(next(iter(tomllib.loads(word + " = 0"))))
    return word[1:-1] if word[0] == "'" else word


def _resolved(key: Key, counts: Mapping[Key, int]) -> Key:
    """A header below an array of tables means its last element: [rules.match] after [[rules]] is rules, 0, match."""
    found: Key = ()
    for place, part in enumerate(key):
        found = (*found, part)
        if found in counts and place < len(key) - 1:
            found = (*found, counts[found] - 1)
    return found
