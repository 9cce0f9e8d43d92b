"""`headrace gateway`: start the gateway. `headrace gateway check`: say whether its configuration works.

A check reads the file, shows the address that each upstream's chat requests go to, and asks every upstream for its
models: the list says whether the key is right and whether the names are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.cli.options import Option, parse_options

if TYPE_CHECKING:
    from headrace.gateway.snapshot import Snapshot

USAGE = """\
headrace gateway [options]         one address and one key for many models
headrace gateway check [options]   check the configuration and ask every upstream

  --config FILE       headrace.toml, config.toml or a providers/routing JSON; else ./headrace.toml, else the
                      engine at http://127.0.0.1:8000
  --host HOST         address to listen on (127.0.0.1)
  --port PORT         port to listen on (8080)
  --database URL      sqlite:///FILE or postgresql://USER@HOST/NAME; else SQLite in the data directory
  --data-dir DIR      where keys and usage are kept (~/.headrace)
  --log-level LEVEL   debug, info, warning or error

check only:
  --no-probe          ask no upstream
  --json              the result as JSON

Exit status: 0 when all is well, 2 when the configuration or an upstream is not.
"""

CONFIG = Option("config", "FILE")
SERVING = (
    Option("host", "HOST"),
    Option("port", "PORT", number=(0, 65535)),
    Option("database", "URL"),
    Option("data-dir", "DIR"),
    Option("log-level", "LEVEL", choices=("debug", "info", "warning", "error")),
)
CHECKING = (Option("no-probe"), Option("json"))


def gateway_command(words: Sequence[str]) -> int:
    """Run `headrace gateway` with `words`; returns the exit status."""
    if words and words[0] == "check":
        return _check(words[1:])
    options = parse_options("headrace gateway", words, (CONFIG, *SERVING), USAGE)
    if isinstance(options, int):
        return options
    from headrace.gateway.config_load import Overrides
    from headrace.gateway.run import run

    port = options.get("port")
    overrides = Overrides(
        host=options.get("host"),
        port=None if port is None else int(port),
        database_url=options.get("database"),
        data_dir=options.get("data-dir"),
        log_level=options.get("log-level"),
    )
    return run(options.get("config"), overrides)


def _check(words: Sequence[str]) -> int:
    options = parse_options("headrace gateway check", words, (CONFIG, *SERVING, *CHECKING), USAGE)
    if isinstance(options, int):
        return options
    from headrace.gateway.config_load import InvalidConfig, load_config

    as_json = "json" in options
    try:
        snapshot = load_config(options.get("config"), os.environ)
    except InvalidConfig as error:
        if as_json:
            answer = {"ok": False, "errors": list(error.problems), "warnings": list(error.warnings), "upstreams": []}
            print(json.dumps(answer, indent=2, ensure_ascii=False))
        else:
            for line in error.problems:
                print(f"headrace gateway check: {line}", file=sys.stderr)
        return 2
    return _report(snapshot, as_json=as_json, probe="no-probe" not in options)


def _report(snapshot: Snapshot, *, as_json: bool, probe: bool) -> int:
    from headrace.gateway.probe import probe_all

    results = probe_all(snapshot) if probe else ()
    failed = [result for result in results if not result.ok]
    if as_json:
        upstreams = [
            {
                "name": upstream.name,
                "base_urls": list(upstream.base_urls),
                "chat_url": chat_url(snapshot, upstream.name),
                "models": list(upstream.models),
                "probes": [result.as_json() for result in results if result.upstream == upstream.name],
            }
            for upstream in snapshot.upstreams.values()
        ]
        answer = {
            "ok": not failed,
            "config": snapshot.path,
            "errors": [],
            "warnings": list(snapshot.warnings),
            "models": {name: [f"{t.upstream}/{t.model}" for t in m.targets] for name, m in snapshot.models.items()},
            "default_model": snapshot.default_model,
            "upstreams": upstreams,
        }
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return 2 if failed else 0
    for warning in snapshot.warnings:
        print(f"Note: {warning}")
    print(f"Configuration: {snapshot.path or 'none, so the engine on this machine'}")
    table = [("upstream", "chat requests go to", "models endpoint")]
    for name, upstream in snapshot.upstreams.items():
        said = [result for result in results if result.upstream == name]
        for replica in range(len(upstream.base_urls)):
            note = said[replica].text if said else "not asked"
            table.append((name if replica == 0 else "", chat_url(snapshot, name, replica), note))
    print_table(table)
    if snapshot.models:
        rows = [("model", "targets", "context")]
        for model in snapshot.models.values():
            targets = ", ".join(t.upstream + (f" as {t.model}" if t.model != model.name else "") for t in model.targets)
            rows.append((model.name, targets, "" if model.context_window is None else str(model.context_window)))
        print()
        print_table(rows)
    return 2 if failed else 0


def chat_url(snapshot: Snapshot, name: str, replica: int = 0) -> str:
    """The joined address of an upstream's chat endpoint, in its own dialect."""
    upstream = snapshot.upstreams[name]
    return upstream.url("/messages" if upstream.dialect == "anthropic" else "/chat/completions", replica)


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
