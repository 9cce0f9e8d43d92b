"""What the terminal shows while the model loads: a bar for people, plain lines for logs."""

from __future__ import annotations

import asyncio
import sys
from typing import TextIO

from headrace.protocol.ipc import EngineInfo
from headrace.server.engine_client import EngineClient

LOOK_S = 0.1
LINE_STEP_PERCENT = 20


async def show_progress(client: EngineClient, until: asyncio.Future[EngineInfo], out: TextIO | None = None) -> None:
    """Show `client.loading` until `until` is done, whatever it ends with."""
    stream = out if out is not None else sys.stderr
    if stream.isatty():
        await _bar(client, until, stream)
    else:
        await _lines(client, until, stream)


async def _lines(client: EngineClient, until: asyncio.Future[EngineInfo], out: TextIO) -> None:
    shown: tuple[str, int] | None = None
    while not until.done():
        now = client.loading
        if now is not None and now.total:
            percent = 100 * now.done // now.total
            mark = (now.phase, percent // LINE_STEP_PERCENT)
            if mark != shown:
                shown = mark
                print(f"{now.phase}: {percent} %", file=out, flush=True)
        await asyncio.wait({until}, timeout=LOOK_S)


async def _bar(client: EngineClient, until: asyncio.Future[EngineInfo], out: TextIO) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(file=out), transient=True) as progress:
        bar = progress.add_task("Starting the engine", total=None)
        while not until.done():
            now = client.loading
            if now is not None:
                progress.update(bar, description=now.phase, completed=now.done, total=now.total or None)
            await asyncio.wait({until}, timeout=LOOK_S)
