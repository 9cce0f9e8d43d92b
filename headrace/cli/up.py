"""`headrace up`: engines and the gateway before them, together in one go.

Without a file: one engine with the given flags at 127.0.0.1:8000 and the gateway at 127.0.0.1:8080. With
`--config headrace.toml`: one engine for each `[engine.NAME]`, the rest of the file is the gateway's. All HTTP is on
one event loop of this process; every engine computes in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.options import Option, parse_options
from headrace.config import gateway_defaults

if TYPE_CHECKING:
    from headrace.config.settings import EngineSettings, ServerSettings
    from headrace.gateway.config_load import Overrides
    from headrace.gateway.ledger import Ledger
    from headrace.gateway.logs import GatewayLog
    from headrace.gateway.snapshot import Snapshot
    from headrace.protocol.ipc import EngineInfo
    from headrace.server.core_start import StartCore

USAGE = """\
headrace up [MODEL] [flags]           serve a model (the bundled one) with the gateway before it
headrace up --config headrace.toml    the engines and the gateway that the file describes

  --gateway-host HOST       address of the gateway (127.0.0.1)
  --gateway-port PORT       port of the gateway (8080)
  --gateway-database URL    sqlite:///FILE or postgresql://USER@HOST/NAME; else SQLite in the data directory
  --data-dir DIR            where keys and usage are kept (~/.headrace)

All other flags are the engine's: `headrace serve --help` lists them.
"""

GATEWAY_OPTIONS = (
    Option("gateway-host", "HOST"),
    Option("gateway-port", "PORT", number=(0, 65535)),
    Option("gateway-database", "URL"),
    Option("data-dir", "DIR"),
)
LATEST_END_S = 3.0
"""After a signal without patience, for everything together."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine to start. `name` is its upstream's name. What its files say is not kept: vocabularies are large."""

    name: str
    settings: EngineSettings
    server: ServerSettings


def up_command(words: Sequence[str], start_core: StartCore) -> int:
    """Run `headrace up` with `words`; returns the exit status."""
    from headrace.cli.serve import serve_command

    if any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    ours, rest = _gateway_words(words)
    options = parse_options("headrace up", ours, GATEWAY_OPTIONS, USAGE)
    if isinstance(options, int):
        return options
    if any(word.split("=")[0].replace("_", "-") in ("--dry-run", "--help") for word in rest):
        return serve_command("up", rest, start_core)
    config = _config_file(rest)
    if config is not None:
        from headrace.gateway.config_load import is_gateway_config

        if is_gateway_config(Path(config)):
            return _up_from_file(config, rest, _overrides(options), start_core)
    return _up_with_flags(rest, options, start_core)


def _overrides(options: Mapping[str, str]) -> Overrides:
    from headrace.gateway.config_load import Overrides

    port = options.get("gateway-port")
    return Overrides(
        host=options.get("gateway-host"),
        port=None if port is None else int(port),
        database_url=options.get("gateway-database"),
        data_dir=options.get("data-dir"),
    )


def _gateway_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The gateway's options with their values, and everything else."""
    names = {f"--{option.name}" for option in GATEWAY_OPTIONS}
    ours: list[str] = []
    rest: list[str] = []
    takes_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-")
        mine = takes_value or name in names or name.startswith("--gateway-")
        (ours if mine else rest).append(word)
        takes_value = not takes_value and mine and not equals
    return ours, rest


def _config_file(words: Sequence[str]) -> str | None:
    """The value of --config among serve flags."""
    for i, word in enumerate(words):
        if word == "--config" and i + 1 < len(words):
            return words[i + 1]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def _up_with_flags(words: Sequence[str], options: Mapping[str, str], start_core: StartCore) -> int:
    engine = _engine("engine", words, "", options.get("data-dir"))
    if engine is None:
        return 2

    def wanted() -> tuple[Snapshot, Overrides]:
        overrides = _overrides(options)
        return _snapshot_of(engine.server, overrides), overrides

    port = int(options.get("gateway-port", gateway_defaults.PORT))
    return _start([engine], Address(options.get("gateway-host", gateway_defaults.HOST), port), wanted, start_core)


def _snapshot_of(server: ServerSettings, overrides: Overrides) -> Snapshot:
    """A gateway before one engine. Raises InvalidConfig."""
    from headrace.cli.startup import base_url
    from headrace.gateway.config_load import engine_snapshot
    from headrace.gateway.snapshot import Upstream

    upstream = Upstream(
        name="engine",
        base_url=base_url(server),
        api_key=server.api_keys[0] if server.api_keys else None,
        models=server.served_model_names,
        health_path="/health",
    )
    return engine_snapshot(upstream, os.environ, overrides)


def _up_from_file(config: str, words: Sequence[str], overrides: Overrides, start_core: StartCore) -> int:
    from headrace.gateway.config_load import InvalidConfig, load_config

    others = [word for word in words if word not in ("--config", config, f"--config={config}")]
    if others:
        return _refused([f"{others[0]} belongs into {config}: the flags of an engine are keys of its [engine.NAME]."])
    try:
        snapshot = load_config(config, os.environ, overrides=overrides)
    except InvalidConfig as error:
        return _refused(error.problems)
    if not snapshot.engines:
        return _refused(
            [f"{config} has no [engine.NAME], so there is no engine to start. Use headrace gateway --config {config}."]
        )
    engines = []
    for spec in snapshot.engines:
        engine = _engine(spec.name, spec.flags, f"[engine.{spec.name}] ", snapshot.listen.data_dir)
        if engine is None:
            return 2
        engines.append(engine)
    at = Address(snapshot.listen.host, snapshot.listen.port)
    return _start(engines, at, lambda: (snapshot, overrides), start_core)


def _engine(name: str, words: Sequence[str], place: str, data_dir: str | None) -> Engine | None:
    """The checked settings of one engine; None after its mistakes have been printed. What it keeps, it keeps in
    `data_dir` with the rest, unless its flags say otherwise."""
    import msgspec

    from headrace.cli.serve import with_port
    from headrace.config.load import LaunchError, load

    try:
        launch = load(words)
    except LaunchError as error:
        _refused([place + line for line in error.errors])
        return None
    for notice in launch.notices:
        print(f"Note: {place}{notice}", file=sys.stderr, flush=True)
    kept = launch.server.batch_dir or str(Path(data_dir or gateway_defaults.DATA_DIR) / "engine" / name)
    return Engine(name, launch.engine, with_port(msgspec.structs.replace(launch.server, batch_dir=kept)))


def _refused(lines: Sequence[str]) -> int:
    for line in lines:
        print(f"headrace up: {line}", file=sys.stderr)
    return 2


@dataclass(frozen=True, slots=True)
class Address:
    """Where the gateway listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway with its address and its database, ready to serve."""

    snapshot: Snapshot
    overrides: Overrides
    listener: socket.socket
    ledger: Ledger
    log: GatewayLog


def _start(
    engines: Sequence[Engine],
    at: Address,
    wanted: Callable[[], tuple[Snapshot, Overrides]],
    start_core: StartCore,
) -> int:
    import uvloop

    from headrace.protocol.http_listener import CannotListen, listen, next_free_port
    from headrace.server.run import USUAL_PORT, configure_logging, leave_soon

    configure_logging(engines[0].server.uvicorn_log_level)
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        try:
            for e in engines:
                opened = listen(e.server.host, e.server.port, USUAL_PORT)
                listeners.append(stack.enter_context(contextlib.closing(opened)))
            listener = stack.enter_context(
                contextlib.closing(listen(at.host, at.port, gateway_defaults.PORT, "gateway-"))
            )
        except CannotListen as error:
            if len(listeners) == len(engines) and any(e.server.port == at.port for e in engines):
                free = next_free_port(at.host, at.port)
                return _failed(f"Port {at.port} is the engine's and the gateway's: use --gateway-port {free}.")
            return _failed(error)
        status = uvloop.run(_run(engines, listeners, partial(_open_gateway, wanted, listener, stack), start_core))
        leave_soon(status)
        return status


def _failed(error: Exception | str) -> int:
    print(f"headrace up: {error}", file=sys.stderr)
    return 1


def _open_gateway(
    wanted: Callable[[], tuple[Snapshot, Overrides]], listener: socket.socket, stack: contextlib.ExitStack
) -> Gateway | int:
    """The `wanted` gateway behind `listener`, closed with `stack`; the exit status after its mistakes have been
    printed. Blocks."""
    from headrace.config.errors import ConfigError
    from headrace.gateway.config_load import InvalidConfig
    from headrace.gateway.logs import GatewayLog
    from headrace.gateway.redact import Redactor
    from headrace.gateway.run import open_ledger_at, secrets_of

    try:
        snapshot, overrides = wanted()
        ledger = stack.enter_context(contextlib.closing(open_ledger_at(snapshot.listen)))
    except InvalidConfig as error:
        return _refused(error.problems)
    except ConfigError as error:
        return _failed(error)
    log = stack.enter_context(contextlib.closing(GatewayLog(redactor=Redactor(secrets_of(snapshot)))))
    return Gateway(snapshot, overrides, listener, ledger, log)


async def _all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


async def _run(
    engines: Sequence[Engine],
    listeners: Sequence[socket.socket],
    open_gateway: Callable[[], Gateway | int],
    start_core: StartCore,
) -> int:
    from headrace.cli.startup import print_block, print_lines
    from headrace.server.run import Ending, run_engine

    ending = Ending()
    infos: dict[str, EngineInfo] = {}
    all_ready = asyncio.Event()

    def note_ready(engine: Engine, info: EngineInfo) -> None:
        print_block(info, engine.settings)
        infos[engine.name] = info
        if len(infos) == len(engines):
            all_ready.set()

    listen = [asyncio.Event() for _ in engines]
    running = [
        asyncio.create_task(
            run_engine(
                engine.settings,
                engine.server,
                listener,
                start_core,
                partial(note_ready, engine),
                ending,
                listens.set,
            )
        )
        for engine, listener, listens in zip(engines, listeners, listen, strict=True)
    ]
    # The engines' servers before the gateway, one after the other, while the cores load.
    listening = asyncio.create_task(_all(listen))
    await asyncio.wait({listening, *running}, return_when=asyncio.FIRST_COMPLETED)
    if not listening.done():
        listening.cancel()
        ending.came.set()
        return max(await asyncio.gather(*running))
    gateway = await asyncio.to_thread(open_gateway)
    if isinstance(gateway, int):
        ending.came.set()
        return max(gateway, *await asyncio.gather(*running))
    from headrace.gateway.run import serve

    snapshot, log = gateway.snapshot, gateway.log
    failed = 0
    ready = asyncio.create_task(all_ready.wait())
    await asyncio.wait({ready, *running}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        log.start(snapshot.listen.log_level)
        serving = asyncio.create_task(
            serve(
                snapshot,
                gateway.overrides,
                gateway.ledger,
                gateway.listener,
                log,
                None,
                ended=ending.came,
                is_patient=lambda: ending.is_patient,
            )
        )
        try:
            print_lines(_last_lines(engines, infos, gateway))
        except OSError as error:
            failed = _failed(f"standard output cannot be written: {error.strerror}")
            ending.came.set()
        # The engines end when the gateway has: what still runs through it needs them.
        await asyncio.wait({serving, *running}, return_when=asyncio.FIRST_COMPLETED)
        ending.came.set()
        await asyncio.wait({serving}, timeout=None if ending.is_patient else LATEST_END_S)
    ready.cancel()
    ending.came.set()
    return max(failed, *await asyncio.gather(*running))


def _last_lines(engines: Sequence[Engine], infos: dict[str, EngineInfo], gateway: Gateway) -> list[str]:
    """What a person needs now: address, key, models, room, and two examples that work when pasted."""
    from headrace.cli.startup import base_url, example_lines, room_line, vector_example_lines
    from headrace.gateway.run import banner

    record, secret = gateway.ledger.store.first()
    if secret is not None:
        gateway.ledger.keys.reload()
    lines = ["", *banner(gateway.snapshot, gateway.listener.getsockname()[1], record, secret)]
    lines += [f"Engine         {engine.name}: {room_line(infos[engine.name])}" for engine in engines]
    shown = next((engine for engine in engines if engine.settings.pooler is None), engines[0])
    server = shown.server
    # A key is shown once only; later the example that works when pasted is the engine's own, which asks for none.
    url = lines[1].split()[-1] if secret is not None else base_url(server)
    examples = example_lines if shown.settings.pooler is None else vector_example_lines
    return [*lines, "", *examples(server, url, secret), "Ctrl-C ends it."]
