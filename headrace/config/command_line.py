"""Words of a command line, and keys of a config file, become values by the flag table.

Nothing stops at the first mistake: every one becomes a line in `Given.errors`, so that a person mends a command
once. A config file is read as if its flags stood before those of the command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.config.errors import ConfigError
from headrace.config.flag_table import FLAG_BY_NAME, FLAGS
from headrace.config.flags import Flag, canonical, closest, is_short


@dataclass(slots=True)
class Given:
    """What a person said. `values` holds only the flags that were used, by name."""

    values: dict[str, object] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    """How the flag was written, for messages: `--swap-space 8`."""
    positional: str | None = None
    errors: list[str] = field(default_factory=list)

    def value(self, name: str) -> object:
        """The value of flag `name`: as given, else the table's default."""
        return self.values.get(name, FLAG_BY_NAME[name].default)

    def notices(self) -> list[str]:
        """One line for every mapped flag that asks for something."""
        lines = []
        for flag, value in self._used():
            if flag.state == "mapped" and not flag.is_harmless(value):
                lines.append(f"{self.spelled[flag.name]}: {flag.note}.")
        return lines

    def refusals(self) -> list[str]:
        """One line for every flag that asks for a feature which is not built yet."""
        lines = []
        for flag, value in self._used():
            if flag.state == "refused" and not flag.is_harmless(value):
                advice = flag.instead or "leave it out"
                lines.append(f"{self.spelled[flag.name]}: {flag.note}: not built yet; {advice}.")
        return lines

    def _used(self) -> list[tuple[Flag, object]]:
        return [(flag, self.values[flag.name]) for flag in FLAGS if flag.name in self.values]


def parse_command_line(words: Sequence[str]) -> Given:
    """Parse flags and at most one positional word (the model); read `--config` when it is there."""
    command = _parse_words(words)
    path = command.values.get("config")
    if not isinstance(path, str):
        return command
    given = Given()
    try:
        _add_file(given, Path(path))
    except ConfigError as error:
        given.errors.append(str(error))
    if command.positional is not None or "model" in command.values:
        given.values.pop("model", None)
    given.values.update(command.values)
    given.spelled.update(command.spelled)
    given.positional = command.positional
    given.errors += command.errors
    return given


def parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that belong to no flag, for commands that take several; and the flags with theirs."""
    plain: list[str] = []
    flags: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            plain.append(word)
            continue
        flags.append(word)
        written, inline = _split(word)
        flag, _, _ = _find(written)
        if flag is not None and inline is None:
            flags += _take_values(flag, rest)
    return plain, flags


def parse_table(table: Mapping[str, object], model: str | None = None) -> Given:
    """Flags as a table, `{"max_model_len": 4096}`, as the in-process class takes them."""
    given = Given(positional=model)
    _add_table(given, table, "LLM: ")
    return given


def _parse_words(words: Sequence[str]) -> Given:
    given = Given()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            for plain in rest:
                _add_positional(given, plain)
            break
        if not _is_flag(word):
            _add_positional(given, word)
            continue
        written, inline = _split(word)
        flag, wanted, inner = _find(written)
        if flag is None:
            given.errors.append(_unknown(written))
            if inline is None and rest and not _is_flag(rest[0]):
                rest.pop(0)
            continue
        texts = [inline] if inline is not None else _take_values(flag, rest)
        _add(given, flag, texts, written, wanted=wanted, inner=inner)
    return given


def _take_values(flag: Flag, rest: list[str]) -> list[str]:
    """Take the words that belong to `flag` from the front of `rest`."""
    texts: list[str] = []
    if flag.kind == "switch":
        return [rest.pop(0)] if rest and rest[0].lower() in ("true", "false") else []
    while rest and not _is_flag(rest[0]) and (flag.many or not texts):
        texts.append(rest.pop(0))
    return texts


def _add_positional(given: Given, word: str) -> None:
    if given.positional is None:
        given.positional = word
    else:
        given.errors.append(f"{word}: a command serves one model, and {given.positional} is named already.")


def _split(word: str) -> tuple[str, str | None]:
    """The flag as written and the value attached to it: `--port=80` and, as compilers do, `-O3` and `-tp2`."""
    attached = re.fullmatch(r"-([A-Za-z]+)(\d+)", word)
    if attached is not None and is_short(attached[1]) and attached[1] in FLAG_BY_NAME:
        return f"-{attached[1]}", attached[2]
    written, equals, inline = word.partition("=")
    return written, inline if equals else None


def _is_flag(word: str) -> bool:
    """A word that starts with a dash and a letter; `-1` and `-` are values."""
    return word.startswith("-") and len(word.lstrip("-")) > 0 and not word.lstrip("-")[0].isdigit()


def _find(word: str) -> tuple[Flag | None, bool, str]:
    """The flag that `word` names, False when it is the `--no-` form of a switch, and the inner key of `--json.key`."""
    name, _, inner = word.lstrip("-").partition(".")
    name = canonical(name)
    one_dash = not word.startswith("--")
    flag = FLAG_BY_NAME.get(name)
    if one_dash and (flag is None or name == flag.name):
        return None, True, ""
    if flag is not None and (not inner or flag.takes_json):
        return flag, True, inner
    flag = FLAG_BY_NAME.get(name.removeprefix("no-")) if name.startswith("no-") and not inner else None
    return (flag, False, "") if flag is not None and flag.kind == "switch" else (None, True, "")


def _add(given: Given, flag: Flag, texts: list[str], written: str, *, wanted: bool = True, inner: str = "") -> None:
    """Parse `texts` as the value of `flag`; a mistake goes to `given.errors`."""
    spelled = " ".join([written, *texts])
    if flag.kind == "switch":
        texts = texts or ["true"]
    if not texts:
        example = flag.example or (flag.choices[0] if flag.choices else "")
        given.errors.append(f"{written} needs a value" + (f", such as {flag.option} {example}." if example else "."))
        return
    try:
        if inner:
            value: object = _nested(given.values.get(flag.name), inner, texts[0])
        elif flag.many:
            parts = [flag.parse(text) for text in texts]
            value = tuple(
                dict.fromkeys(part for item in parts for part in (item if isinstance(item, list) else [item]))
            )
        else:
            value = flag.parse(texts[0])
    except ValueError as error:
        given.errors.append(f"{spelled}: {error}.")
        return
    if flag.kind == "switch" and not wanted:
        value = value is False
    before = given.values.get(flag.name)
    if flag.many and isinstance(before, tuple) and isinstance(value, tuple):
        value = before + tuple(part for part in value if part not in before)
    given.values[flag.name] = value
    given.spelled[flag.name] = written if flag.name in ("api-key", "hf-token") else spelled


def _nested(before: object, inner: str, text: str) -> dict[str, object]:
    """`--hf-overrides.rope_scaling.factor 2` sets one value in the object, `--json.sizes+ 2` adds to a list."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    result: dict[str, object] = dict(before) if isinstance(before, dict) else {}
    place = result
    *parents, last = inner.split(".")
    for parent in parents:
        below = place.get(parent)
        fresh: dict[str, object] = dict(below) if isinstance(below, dict) else {}
        place[parent] = fresh
        place = fresh
    if last.endswith("+"):
        last = last[:-1]
        known = place.get(last)
        value = [*(known if isinstance(known, list) else []), value]
    place[last] = value
    return result


def _unknown(word: str, where: str = "") -> str:
    dashes = "--" if not where else ""
    name = canonical(word)
    names = dict(FLAG_BY_NAME) | {f"no-{flag.name}": flag for flag in FLAGS if flag.kind == "switch"}
    near = closest(name, names)
    near = near if near is not None else next((known for known in names if name and name in known), None)
    hint = f"Did you mean {dashes}{near}?" if near else "`headrace serve --help` lists the flags."
    return f"{where}unknown flag {word}. {hint}"


def _add_file(given: Given, path: Path) -> None:
    """Add the flags of a YAML or TOML file. ConfigError when it cannot be read or is not a table of flags."""
    _add_table(given, read_config_file(path), f"{path}: ")


def _add_table(given: Given, table: Mapping[str, object], where: str) -> None:
    """Add each key as a flag; `where` begins the line of a mistake."""
    keys: dict[str, str] = {}
    for key, raw in table.items():
        flag, wanted, inner = _find("--" + canonical(str(key)))
        if flag is None:
            given.errors.append(_unknown(str(key), where))
        elif inner:
            given.errors.append(f"{where}{key}: write {str(key).partition('.')[0]} as a table with {inner} in it.")
        elif flag.name == "config":
            given.errors.append(f"{where}a config file cannot name another one ({key}).")
        elif flag.name in keys:
            given.errors.append(f"{where}{keys[flag.name]} and {key} are the same flag: keep one.")
        elif raw is not None:
            try:
                texts = value_texts(flag, raw)
            except ValueError as error:
                given.errors.append(f"{where}{key} {error}.")
                continue
            before = len(given.errors)
            _add(given, flag, texts, str(key), wanted=wanted)
            given.errors[before:] = [where + line for line in given.errors[before:]]
        if flag is not None:
            keys.setdefault(flag.name, str(key))


def value_texts(flag: Flag, raw: object) -> list[str]:
    """A flag's value in a file, or in a call of Python, as the words of a command line.

    ValueError when it is of a kind that the flag does not take; the message goes on after the key's name.
    """
    if isinstance(raw, list | tuple):
        if not flag.many:
            raise ValueError(f"takes one value, and this is a list of {len(raw)}")
        if any(isinstance(part, list | tuple) or part is None for part in raw):
            raise ValueError("takes a plain list, without lists or empty values in it")
        return [text for part in raw for text in value_texts(flag, part)]
    if isinstance(raw, Mapping):
        if not flag.takes_json:
            raise ValueError("takes one value, and this is a table")
        return [json.dumps(raw, default=str)]
    if isinstance(raw, bool):
        if flag.kind == "text":
            raise ValueError("takes a text, and this is true or false: put the word into quotes if it is meant")
        return ["true" if raw else "false"]
    return [str(raw)]


def read_config_file(path: Path) -> dict[str, object]:
    """The top-level table of a .toml, .yaml or .yml file. ConfigError names the file and the place of a mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--config {path}: cannot be read: {reason}.") from None
    table: object
    if path.suffix.lower() == ".toml":
        import tomllib

        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--config {path}: not valid TOML: {error}.") from None
    else:
        import yaml

        try:
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
            _check_keys(node)
            table = loader.construct_document(node) if node is not None else None
        except yaml.YAMLError as error:
            raise ConfigError(f"--config {path}: not valid YAML: {' '.join(str(error).split())}.") from None
        except ValueError as error:
            raise ConfigError(f"--config {path}: {error}.") from None
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ConfigError(f"--config {path}: must be a table of flags, such as `max-model-len: 8192`.")
    return table


def _check_keys(node: object) -> None:
    """ValueError when a key of a YAML document stands twice in one table: its reader would take the last."""
    seen: set[int] = set()
    rest = [node]
    while rest:
        below = rest.pop()
        parts = getattr(below, "value", None)
        if not isinstance(parts, list) or id(below) in seen:
            continue
        seen.add(id(below))
        pairs = [part for part in parts if isinstance(part, tuple)]
        lines: dict[object, int] = {}
        for key, _ in pairs:
            line = key.start_mark.line + 1
            first = lines.setdefault((key.tag, str(key.value)), line)
            if first != line:
                raise ValueError(f"the key {key.value} stands twice, in lines {first} and {line}; keep one")
        rest += [part for _, part in pairs] if pairs else parts
