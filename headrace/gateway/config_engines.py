"""`[engine.NAME]`: flags of `headrace serve` with underscores for dashes, and the upstream that such an engine is.

`headrace up --config FILE` starts one engine for each; the gateway only needs to know where they listen.
"""

from __future__ import annotations

from pathlib import PurePath

from headrace.config.command_line import Given, parse_command_line, value_texts
from headrace.config.flag_table import FLAG_BY_NAME
from headrace.config.flags import Flag, canonical, closest
from headrace.config.resolve import BUNDLED_NAME
from headrace.gateway.config_section import Section, dotted
from headrace.gateway.config_values import plain
from headrace.gateway.snapshot import EngineSpec, Upstream

FIRST_PORT = 8000
NOT_FOR_ENGINES = ("config", "dry-run", "json")


def read_engines(root: Section) -> tuple[tuple[EngineSpec, Upstream], ...]:
    """Every `[engine.NAME]` with its upstream. An engine without a port gets the first free one from 8000 up."""
    found: list[tuple[str, Section, list[str], Given]] = []
    for name, section in root.sections("engine"):
        words = _words(section)
        if words is None:
            continue
        given = parse_command_line(words)
        for error in given.errors:
            section.complain(None, error)
        if not given.errors:
            found.append((name, section, words, given))
    taken = {int(str(given.values["port"])) for _, _, _, given in found if "port" in given.values}
    engines = []
    for name, section, words, given in found:
        port = given.values.get("port")
        if port is None:
            port = next(number for number in range(FIRST_PORT, 65536) if number not in taken)
            taken.add(port)
            words += ["--port", str(port)]
        elif port == 0:
            section.complain("port", "must be a fixed port: the gateway has to know it.")
        elif sum(other.values.get("port") == port for _, _, _, other in found) > 1:
            section.complain("port", f"is {port}, as another engine's; give each its own or leave it out.")
        spec = EngineSpec(name=name, flags=tuple(words), upstream=name)
        engines.append((spec, _upstream(name, given, int(str(port)))))
    return tuple(engines)


def _words(section: Section) -> list[str] | None:
    """The table as words of a command line; None when it has a mistake."""
    words: list[str] = []
    keys: dict[str, str] = {}
    correct = True
    for key in section.table:
        name = canonical(key)
        flag = FLAG_BY_NAME.get(name) or FLAG_BY_NAME.get(name.removeprefix("no-"))
        if flag is None or flag.name in NOT_FOR_ENGINES:
            near = closest(name, FLAG_BY_NAME)
            hint = f"Did you mean {near.replace('-', '_')}?" if near else "`headrace serve --help` lists the flags."
            place = section.place(key)
            section.problems.error(place, f"unknown key {dotted((*section.key, key))}. {hint}")
            correct = False
            continue
        texts = _texts(section, key, flag)
        if texts is None:
            correct = False
        elif flag.name in keys:
            section.complain(key, f"and {keys[flag.name]} are the same flag: keep one.")
            correct = False
        elif flag.kind == "switch" and texts in (["true"], ["false"]):
            words.append(f"--{name}={texts[0]}")
        elif flag.many:
            words += [f"--{name}", *texts]
        else:
            words += [f"--{name}={text}" for text in texts]
        keys.setdefault(flag.name, key)
    return words if correct else None


def _texts(section: Section, key: str, flag: Flag) -> list[str] | None:
    """The words of one value, its placeholders filled; None when it is none for the flag."""
    value = plain(section.raw(key))
    fill = section.placeholders.fill
    try:
        if isinstance(value, str):
            value = fill(value)
        elif isinstance(value, list):
            value = [fill(item) if isinstance(item, str) else item for item in value]
        return value_texts(flag, value)
    except ValueError as error:
        section.complain(key, f"{error}.")
        return None


def _upstream(name: str, given: Given, port: int) -> Upstream:
    host = str(given.value("host"))
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    served = given.values.get("served-model-name")
    keys = given.values.get("api-key")
    model = given.positional or given.values.get("model") or BUNDLED_NAME
    names = tuple(str(part) for part in served) if isinstance(served, tuple) else _names_of(str(model))
    scheme = "https" if given.values.get("ssl-certfile") else "http"
    return Upstream(
        name=name,
        base_url=f"{scheme}://{reachable}:{port}/v1",
        api_key=str(keys[0]) if isinstance(keys, tuple) and keys else None,
        models=names,
        health_path="/health",
    )


def _names_of(model: str) -> tuple[str, ...]:
    """An engine without served names answers to the model as written and to its last part."""
    last = PurePath(model.rstrip("/")).name
    return tuple(dict.fromkeys((model, last))) if last else (model,)
