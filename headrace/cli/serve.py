"""`headrace serve`, and what it shares with `headrace up`: check the command, say what will happen, start the server.

Mistakes end here, all of them at once, one line each, exit status 2. `--dry-run` stops after the checks.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from headrace.config.load import Launch
    from headrace.config.settings import ServerSettings
    from headrace.protocol.ipc import EngineInfo
    from headrace.server.core_start import StartCore

Command = Literal["serve", "up"]

_USAGE = {
    "serve": "headrace serve [MODEL] [flags]: serve a model behind the OpenAI API.",
    "up": "headrace up [flags]: serve the bundled model and show how to use it. The flags are those of `serve`.",
}


def serve_command(command: Command, words: Sequence[str], start_core: StartCore) -> int:
    """Run `headrace serve` or `headrace up` with `words`; returns the exit status."""
    for word in words:
        if word in ("-h", "--help") or word.startswith("--help="):
            from headrace.cli.flag_help import help_text

            query = word.partition("=")[2]
            print(help_text(_USAGE[command], query, shutil.get_terminal_size((100, 40)).columns), end="")
            return 0

    from headrace.config.command_line import parse_command_line
    from headrace.config.load import LaunchError, load_given

    given = parse_command_line(words)
    dry_run, as_json = bool(given.value("dry-run")), bool(given.value("json"))
    try:
        launch = load_given(given)
    except LaunchError as error:
        return _refuse(command, error.errors, error.notices, as_json=dry_run and as_json)
    if dry_run:
        return _dry_run(command, launch, as_json)
    for notice in launch.notices:
        print(f"Note: {notice}", file=sys.stderr, flush=True)
    return _start(launch, start_core)


def _refuse(command: Command, errors: Sequence[str], notices: Sequence[str], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"ok": False, "errors": list(errors), "notices": list(notices)}, indent=2))
    else:
        for error in errors:
            print(f"headrace {command}: {error}", file=sys.stderr)
    return 2


def _dry_run(command: Command, launch: Launch, as_json: bool) -> int:
    import msgspec

    from headrace.cli.dry_run import predicted_info, shown_settings, text_notices
    from headrace.cli.startup import access_lines, base_url, block_lines, print_block, print_lines
    from headrace.config.errors import ConfigError

    notices = list(launch.notices)
    errors = []
    try:
        notices += text_notices(launch)
    except ConfigError as error:
        errors.append(str(error))
    try:
        info = predicted_info(launch)
    except ConfigError as error:
        errors.append(str(error))
    if errors:
        return _refuse(command, errors, notices, as_json=as_json)
    engine, server = shown_settings(launch, info)
    if as_json:
        startup = {
            **msgspec.to_builtins(info),
            "kv_cache_tokens": info.kv_cache_tokens,
            "max_concurrency": info.max_concurrency,
            "base_url": base_url(launch.server),
            "lines": block_lines(info, launch.engine),
        }
        answer = {"ok": True, "errors": [], "notices": notices}
        print(json.dumps({**answer, "startup": startup, "engine": engine, "server": server}, indent=2))
        return 0
    print_lines([f"Note: {notice}" for notice in notices])
    print_block(info, launch.engine)
    print_lines(access_lines(launch.server, base_url(launch.server)))
    print_lines(["", "Effective settings:"])
    print_lines([f"  {name} = {json.dumps(value, ensure_ascii=False)}" for name, value in {**engine, **server}.items()])
    print_lines(["", "This was a dry run: nothing was loaded, nothing is running."])
    return 0


def _start(launch: Launch, start_core: StartCore) -> int:
    from headrace.cli.startup import access_lines, base_url, print_block, print_lines
    from headrace.server.run import serve

    engine, server = launch.engine, with_port(launch.server)

    def banner(info: EngineInfo) -> None:
        print_block(info, engine)
        url = base_url(server)
        print_lines(access_lines(server, url))

    return serve(engine, server, start_core, banner)


def with_port(server: ServerSettings) -> ServerSettings:
    """The settings, with a port that is free now in place of 0: the examples on the screen must name it."""
    import msgspec

    if server.port != 0:
        return server
    with socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET) as probe:
        probe.bind((server.host, 0))
        return msgspec.structs.replace(server, port=int(probe.getsockname()[1]))
