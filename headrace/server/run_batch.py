"""`headrace run-batch` behind the command line: both files read, then an engine that answers what is left.

    input, output checked ─► core spawned ─► lines answered by the server's own routes ─► core ended

Nothing listens. Stopped by a signal, it keeps what is done; killed, the next run begins where this one ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from headrace.config.settings import EngineSettings, ServerSettings
from headrace.protocol.batches import model_digest
from headrace.server.batch_call import call, check_line
from headrace.server.batch_lines import Answered, Asked, NotAnOutputFile, answered_lines, asked_lines
from headrace.server.batch_run import BatchRun, OutputFile, Window
from headrace.server.engine_client import EngineClient
from headrace.server.metrics import EngineMetrics
from headrace.server.run import CORE_PATIENCE_S, Ending, bound_heaps, build_app, until_ready

MOST_DEATHS = 8
"""Deaths of the engine without a line answered between them, after which the batch is given up."""
LOOK_S = 1.0


class CannotRun(Exception):
    """The batch cannot be done; the message says why and what to change. What is there was left as it is."""


@dataclass(frozen=True)
class Files:
    """A checked batch. `output` is locked for as long as it is open."""

    source: Path
    output: Path
    asked: Asked
    answered: Answered
    model: str
    """Its digest."""


@dataclass(frozen=True)
class Standing:
    """How far a batch has come. Tokens and seconds are this run's, counted from when the engine was ready."""

    num_requests: int
    num_answered: int
    num_failed: int
    num_before: int
    """Answered by earlier runs."""
    prompt_tokens: int
    generated_tokens: int
    seconds: float


Show = Callable[[Standing], None]
End = Literal["done", "interrupted", "terminated"]


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Nobody else writes to `output` meanwhile; one that is new and stays empty goes again. Raises CannotRun."""
    is_new = not output.exists()
    try:
        file = os.open(output, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CannotRun(f"{output} cannot be written: {error.strerror}.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise CannotRun(f"{output} is being written by another run-batch. Wait for it, or write elsewhere.") from None
    try:
        yield
    finally:
        if is_new and os.fstat(file).st_size == 0:
            output.unlink(missing_ok=True)
        os.close(file)


async def checked_files(source: Path, output: Path, model: str, limit_bytes: int) -> Files:
    """Both files read once. `model`: where it lies. Raises CannotRun, NotAnOutputFile and OSError."""
    answered = await answered_lines(output)
    digest = model_digest(str(Path(model).resolve()))
    if answered.models - {digest}:
        raise NotAnOutputFile(f"not all of its answers are of the model {model}")
    asked = await asked_lines(source, answered, check_line, limit_bytes)
    if asked.num_duplicates:
        faults = [fault.message for fault in asked.faults if fault.code == "duplicate_custom_id"]
        more = asked.num_duplicates - len(faults)
        raise CannotRun("\n".join([*faults, *([f"And {more} more."] if more else []), "Nothing was done."]))
    return Files(source, output, asked, answered, digest)


async def run_batch(
    engine_settings: EngineSettings, server_settings: ServerSettings, files: Files, show: Show
) -> tuple[Standing, End]:
    """Answers every line that has no answer. `show` is told now and then how far it is.

    Must run in the main thread. Raises ConfigError and StartupError where the engine cannot be started, CannotRun
    where it dies again and again, OSError where the output cannot be written.
    """
    bound_heaps()
    metrics = EngineMetrics(server_settings.served_model_names[0])
    client = EngineClient(engine_settings, metrics)
    ending = Ending()
    ending.clients.append(client)
    await client.start()
    ended = asyncio.create_task(ending.came.wait())
    try:
        app = await asyncio.to_thread(build_app, engine_settings, server_settings, client, metrics)
        ready = asyncio.create_task(until_ready(client))
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ready.cancel()
            return unchanged(files), _end(ending)
        info = ready.result()
        with OutputFile(files.output, files.answered.end) as output:
            run = BatchRun(
                files.source,
                files.asked,
                answers=output,
                failures=output,
                num_failed=files.answered.num_failed,
                call=partial(call, app.dispatch),
                check_url=check_line,
                window=Window(info.max_num_seqs + min(info.max_num_seqs, engine_settings.max_num_queued_reqs)),
                limit_bytes=server_settings.max_body_bytes,
                model=files.model,
            )
            standing = await _watched(run, client, files, ended, show)
        is_done = standing.num_answered == standing.num_requests
        return standing, "done" if is_done else _end(ending)
    finally:
        ended.cancel()
        await client.stop(CORE_PATIENCE_S)


def unchanged(files: Files) -> Standing:
    """Where a batch stands before anything is done."""
    num_answered = files.asked.num_answered
    return Standing(files.asked.num_requests, num_answered, files.answered.num_failed, num_answered, 0, 0, 0.0)


async def _watched(
    run: BatchRun, client: EngineClient, files: Files, ended: asyncio.Task[bool], show: Show
) -> Standing:
    """Until all is answered or a signal comes. Raises CannotRun, and what the run raises."""
    began = time.monotonic()
    num_answered, num_restarts = run.num_answered, client.num_restarts
    running = asyncio.create_task(run.run())

    def standing() -> Standing:
        metrics = client.metrics
        return Standing(
            run.num_requests,
            run.num_answered,
            run.num_failed,
            files.asked.num_answered,
            metrics.prompt_tokens,
            metrics.generation_tokens,
            time.monotonic() - began,
        )

    try:
        while not running.done() and not ended.done():
            await asyncio.wait({running, ended}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            show(standing())
            if run.num_answered > num_answered:
                num_answered, num_restarts = run.num_answered, client.num_restarts
            elif client.num_restarts - num_restarts >= MOST_DEATHS:
                raise CannotRun(
                    f"The engine died {MOST_DEATHS} times and answered nothing between. Its log is above. What was "
                    f"answered before is in {files.output}; the same command goes on from there."
                )
        if running.done():
            running.result()
        return standing()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _end(ending: Ending) -> End:
    return "terminated" if ending.is_patient else "interrupted"
