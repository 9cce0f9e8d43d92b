"""Putting the gateway into a tool's own settings file, leaving everything else in it as it is.

Each function makes the file's new text from the old one, and checks by parsing both that nothing but our own keys has
changed. `write` keeps a copy of the old file beside it.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from headrace.cli.client_formats import (
    PROVIDER,
    Pieces,
    claude_code_environment,
    codex_parts,
    continue_document,
    continue_item,
    continue_model,
)
from headrace.config.errors import ConfigError

_HEADER = re.compile(r"^\s*\[", re.MULTILINE)
_OUR_TABLE = re.compile(rf"^\[model_providers\.{PROVIDER}\][^\n]*\n(?:(?!\s*\[)[^\n]*(?:\n|$))*", re.MULTILINE)


def codex_file(old: str, pieces: Pieces) -> str:
    """Codex's config.toml: `model` and `model_provider` at the head, the provider's table at the end."""
    before = _toml_table(old)
    top, table = codex_parts(pieces)
    found = _HEADER.search(old)
    head, rest = (old[: found.start()], old[found.start() :]) if found else (old, "")
    for line in top.splitlines():
        head = _with_line(head, line)
    rest = _OUR_TABLE.sub("", rest).rstrip("\n")
    new = "\n\n".join(part for part in (head.rstrip("\n"), rest.strip("\n"), table.rstrip("\n")) if part) + "\n"
    wanted = {**before, **tomllib.loads(top)}
    wanted["model_providers"] = {**before.get("model_providers", {}), **tomllib.loads(table)["model_providers"]}
    if _toml_table(new) != wanted:
        raise ConfigError("the file is written in a way that cannot be changed safely; add the lines by hand.")
    return new


def claude_code_file(old: str, pieces: Pieces) -> str:
    """Claude Code's settings.json: entries of `env`."""
    settings = _json_object(old)
    environment = settings.get("env", {})
    if not isinstance(environment, dict):
        raise ConfigError("`env` is no object in it.")
    settings["env"] = {**environment, **claude_code_environment(pieces)}
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def continue_file(old: str, pieces: Pieces) -> str:
    """Continue's config.yaml: one entry of `models`, replaced when it has our name."""
    before = _yaml_table(old)
    if not before:
        return continue_document(pieces)
    models = before.get("models") or []
    ours = continue_model(pieces)
    kept = [model for model in models if not (isinstance(model, dict) and model.get("name") == ours["name"])]
    if len(kept) < len(models):
        old = _without_item(old, str(ours["name"]))
    found = re.search(r"^models:[ \t]*(#[^\n]*)?\n", old, re.MULTILINE)
    if found is None:
        empty = re.search(r"^models:[ \t]*(\[\]|null|~)?[ \t]*(#[^\n]*)?$", old, re.MULTILINE)
        old = old[: empty.start()] + old[empty.end() :].lstrip("\n") if empty else old
        new = old.rstrip("\n") + "\nmodels:\n" + continue_item(pieces)
    else:
        first = re.compile(r"([ ]*)- ").match(old, found.end())
        new = old[: found.end()] + continue_item(pieces, first[1] if first else "  ") + old[found.end() :]
    if _yaml_table(new) != {**before, "models": [ours, *kept]}:
        raise ConfigError("the file is written in a way that cannot be changed safely; add the model by hand.")
    return new


FILES = {
    "codex": (".codex/config.toml", codex_file),
    "claude-code": (".claude/settings.json", claude_code_file),
    "continue": (".continue/config.yaml", continue_file),
}
"""The file of each tool that has one, below the home directory, and how it is changed."""


def default_path(tool: str, home: Path, environment: Any) -> Path:
    """Where the tool looks; CODEX_HOME and CLAUDE_CONFIG_DIR are those tools' own settings."""
    moved = {"codex": "CODEX_HOME", "claude-code": "CLAUDE_CONFIG_DIR"}.get(tool)
    relative = Path(FILES[tool][0])
    folder = environment.get(moved) if moved else None
    return Path(folder) / relative.name if folder else home / relative


def write(path: Path, text: str) -> Path | None:
    """Put `text` in the file's place, readable by its owner only: it may hold a key. Returns the old one's copy."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    backup = None
    if path.exists():
        backup = next(b for b in _backup_names(path) if not b.exists())
        _create(backup, path.read_bytes())
    fresh = path.with_name(path.name + f".{os.getpid()}.tmp")
    _create(fresh, text.encode())
    fresh.replace(path)
    return backup


def _backup_names(path: Path) -> Any:
    yield path.with_name(path.name + ".before-headrace")
    for number in range(2, 10_000):
        yield path.with_name(f"{path.name}.before-headrace-{number}")


def _create(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _with_line(head: str, line: str) -> str:
    """`key = value` in place of the line of the same key, else before everything."""
    key = line.partition(" ")[0]
    found = re.search(rf"^{key}[ \t]*=[^\n]*$", head, re.MULTILINE)
    if found is None:
        return line + "\n" + head
    return head[: found.start()] + line + head[found.end() :]


def _without_item(text: str, name: str) -> str:
    """YAML without the list item whose first line is `- name: NAME`."""
    written = "|".join(re.escape(form) for form in (name, json.dumps(name, ensure_ascii=False), f"'{name}'"))
    item = re.compile(rf"^([ ]*)- name: (?:{written})[ \t]*\n(?:\1  [^\n]*\n?|\s*\n)*", re.MULTILINE)
    return item.sub("", text, count=1)


def _toml_table(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"it is not valid TOML: {error}.") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise ConfigError(f"it is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ConfigError("it is no JSON object.")
    return value


def _yaml_table(text: str) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"it is not valid YAML: {' '.join(str(error).split())}.") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError("it is no YAML table.")
    return value
