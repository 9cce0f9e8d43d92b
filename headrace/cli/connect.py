"""`headrace connect TOOL`: the settings that make a tool use this gateway, printed or written into the tool's file.

`--import FILE` goes the other way: the settings that a tool has become an upstream of ours.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

from headrace.cli.client_formats import KEY_PLACEHOLDER, KEY_VARIABLE, MODEL_PLACEHOLDER, TOOLS, Pieces, root_of
from headrace.cli.options import Option, parse_options

DEFAULT_URL = "http://127.0.0.1:8080/v1"
ASK_TIMEOUT_S = 1.0

USAGE = f"""\
headrace connect TOOL [options]        settings for codex, claude-code, cline, continue, openai or curl
headrace connect --import FILE         a tool's settings (Cline, Codex auth.json, {{base_url, api_key, model}}) as an
                                       upstream of ours

  --base-url URL   the gateway ({DEFAULT_URL})
  --key KEY        a key of the gateway (`headrace key create NAME` makes one)
  --model NAME     a model of the gateway; left out, its first one
  --write          put the settings into the tool's own file (codex, claude-code, continue), with a copy of the old one;
                   with --import: make this our configuration file (headrace.toml)
  --file FILE      the file to write, where it is not the usual one
  --yes            do not ask before a file is changed
"""

OPTIONS = (
    Option("base-url", "URL"),
    Option("key", "KEY"),
    Option("model", "NAME"),
    Option("write"),
    Option("file", "FILE"),
    Option("yes"),
    Option("import", "FILE"),
)


def connect_command(words: Sequence[str]) -> int:
    """Run `headrace connect` with `words`; returns the exit status."""
    options = parse_options("headrace connect", words, OPTIONS, USAGE, positionals=1)
    if isinstance(options, int):
        return options
    if "import" in options:
        return _import(options)
    tool = options.get("0")
    if tool is None:
        return _refuse(f"name a tool: {', '.join(TOOLS)}.")
    if tool not in TOOLS:
        from headrace.config.flags import closest

        near = closest(tool, TOOLS)
        hint = f"Did you mean {near}?" if near else f"Known are {', '.join(TOOLS)}."
        return _refuse(f"there are no settings for {tool}. {hint}")
    try:
        root = root_of(options.get("base-url", DEFAULT_URL))
    except ValueError as error:
        return _refuse(f"--base-url {error}.")
    key = options.get("key")
    model = options.get("model") or _first_model(root, key)
    if "write" not in options:
        print(TOOLS[tool](Pieces(root, key or KEY_PLACEHOLDER, model or MODEL_PLACEHOLDER)), end="")
        return 0
    if model is None:
        return _refuse("--model is needed: the gateway could not be asked for its models.")
    if key is None and tool != "codex":
        return _refuse("--key is needed. `headrace key create NAME` makes a key.")
    return _write(tool, Pieces(root, key or KEY_PLACEHOLDER, model), options)


def _write(tool: str, pieces: Pieces, options: Mapping[str, str]) -> int:
    from headrace.cli.client_files import FILES, default_path
    from headrace.config.errors import ConfigError

    if tool not in FILES:
        return _refuse(f"{tool} has no settings file to write; `headrace connect {tool}` prints what to enter.")
    path = Path(options["file"]) if "file" in options else default_path(tool, Path.home(), os.environ)
    try:
        old = path.read_text() if path.exists() else ""
        new = FILES[tool][1](old, pieces)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        return _refuse(f"{path} is left as it is: {error}")
    status = _replace(path, old, new, yes="yes" in options, secret=pieces.key)
    if status == 0 and tool == "codex":
        print(f"Codex takes the key from the environment: export {KEY_VARIABLE}={options.get('key', KEY_PLACEHOLDER)}")
    return status


def _import(options: Mapping[str, str]) -> int:
    from headrace.config.errors import ConfigError
    from headrace.gateway.config_clients import TITLES, client_kind, client_settings
    from headrace.gateway.config_document import read_document

    path = Path(options["import"])
    try:
        table = read_document(path).table
    except ConfigError as error:
        return _refuse(str(error))
    kind = client_kind(table)
    if kind is None:
        return _refuse(
            f"{path} has none of the forms that are known: {{base_url, api_key, model}}, Cline's "
            '{"baseUrl", "apiKey", "modelId"}, or an auth.json of Codex. A gateway\'s own file goes to '
            "`headrace gateway --config`."
        )
    try:
        settings = client_settings(table, kind)
    except ValueError as error:
        return _refuse(f"{path}: {error}.")
    text = toml_text(settings.table())
    if "write" in options:
        target = Path(options.get("file", "headrace.toml"))
        if target.exists() and "yes" not in options and not sys.stdin.isatty():
            return _refuse(f"{target} exists; say --yes to replace it (a copy is kept), or --file for another one.")
        old = target.read_text() if target.exists() else ""
        return _replace(target, old, text, yes="yes" in options, secret=settings.api_key or "")
    shown_key = "none" if settings.api_key is None else masked(settings.api_key)
    print(f"# {path}: {TITLES[kind]}")
    print(f"#   address {settings.base_url}, key {shown_key}, model {settings.model or 'none named'}")
    for name in settings.unread:
        print(f"#   {name} means nothing to a gateway and is left out")
    print("# As a configuration of the gateway (--write makes it headrace.toml, with the key):")
    print(text.replace(settings.api_key, shown_key) if settings.api_key else text, end="")
    return 0


def _replace(path: Path, old: str, new: str, *, yes: bool, secret: str) -> int:
    """Write the new text after showing the change and asking; 0 when it is there."""
    from headrace.cli.client_files import write

    if old == new:
        print(f"{path} says this already; nothing to do.")
        return 0
    if old and not yes:
        changes = difflib.unified_diff(old.splitlines(), new.splitlines(), str(path), "after", lineterm="", n=1)
        print("\n".join(changes).replace(secret, masked(secret)) if secret else "\n".join(changes))
        if not sys.stdin.isatty():
            return _refuse(f"{path} exists and is left as it is; say --yes to change it as shown (a copy is kept).")
        if input(f"Change {path}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Left as it is.")
            return 1
    try:
        backup = write(path, new)
    except OSError as error:
        return _refuse(f"{path} cannot be written: {error.strerror}.")
    print(f"Wrote {path}" + (f" (the old one is {backup})" if backup else "") + ".")
    return 0


def masked(key: str) -> str:
    """sk-hr...3f9c: enough to recognise it, too little to use it."""
    return key[:5] + "..." + key[-4:] if len(key) >= 16 else "***"


def toml_text(table: Mapping[str, Any]) -> str:
    """A table of texts, numbers, lists and tables as TOML."""
    lines: list[str] = []

    def add(prefix: tuple[str, ...], inner: Mapping[str, Any]) -> None:
        plain = {name: value for name, value in inner.items() if not isinstance(value, Mapping)}
        if plain and prefix:
            lines.extend(["", "[" + ".".join(_toml_key(part) for part in prefix) + "]"])
        lines.extend(f"{_toml_key(name)} = {_toml_value(value)}" for name, value in plain.items())
        for name, value in inner.items():
            if isinstance(value, Mapping):
                add((*prefix, name), value)

    add((), table)
    return "\n".join(lines).strip("\n") + "\n"


def _toml_key(name: str) -> str:
    bare = name and all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name)
    return name if bare else json.dumps(name, ensure_ascii=False)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _first_model(root: str, key: str | None) -> str | None:
    """What the gateway lists first, if it answers at once."""
    headers = {"authorization": f"Bearer {key}"} if key and key.isascii() else {}
    try:
        with build_opener(ProxyHandler({})).open(
            Request(root + "/v1/models", headers=headers), timeout=ASK_TIMEOUT_S
        ) as a:
            return str(json.loads(a.read(1 << 20))["data"][0]["id"])
    except (URLError, OSError, ValueError, LookupError, TypeError):
        return None


def _refuse(text: str) -> int:
    print(f"headrace connect: {text}", file=sys.stderr)
    return 2
