"""Servers that a benchmark starts, measures and ends, with all their processes."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
MEMORY_LIMIT_BYTES = 16 << 30
"""Of a server's data: what runs away ends itself before it ends the machine."""


class BenchError(Exception):
    """The measurement cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    process: psutil.Popen
    start_s: float
    """From the command until it was ready."""

    def processes(self) -> list[psutil.Process]:
        """Those that are there now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return []

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        status: int | None = self.process.poll()
        return status

    def pss_bytes(self) -> int:
        """Of its processes together, shared memory counted once."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total


def free_port() -> int:
    """One that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def started(
    command: Sequence[str],
    port: int,
    *,
    environment: Mapping[str, str] | None = None,
    core: int | None = None,
    any_answer: bool = False,
) -> Iterator[Server]:
    """The server that `command` runs on `port`, on one `core` of the CPU if that is given.

    It is ready with the first 200 of /health, or with `any_answer` there. Raises BenchError with the end of its output.
    """
    url = f"http://127.0.0.1:{port}"
    _, hardest = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MEMORY_LIMIT_BYTES if hardest == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hardest)
    with tempfile.TemporaryFile("w+") as log:
        started_s = time.perf_counter()
        try:
            process = psutil.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
            )  # fmt: skip
        except OSError as error:
            raise BenchError(f"{shlex.join(command)} did not start: {error}") from None
        try:
            if core is not None:
                process.cpu_affinity([core])
            while not _ready(url, any_answer):
                if process.poll() is not None or time.perf_counter() - started_s > START_TIMEOUT_S:
                    log.seek(0)
                    raise BenchError(f"{shlex.join(command)} did not start:\n{log.read()[-3000:]}")
                time.sleep(0.02)
            yield Server(url, process, time.perf_counter() - started_s)
        finally:
            _stop(process)


def _ready(url: str, any_answer: bool) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return any_answer or response.status == 200
    except urllib.error.HTTPError:
        return any_answer
    except OSError:
        return False


def _stop(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _, alive = psutil.wait_procs(family, STOP_TIMEOUT_S)
        for survivor in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
