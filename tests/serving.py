"""A real `headrace serve` for tests: its own processes, a free port, a memory limit and a log in a file.

`running_server` is a context manager: it waits for /health, and at the end it insists on a clean shutdown.
Most tests share one server through the session fixture `server` in tests/conftest.py.
"""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

MODEL_NAME = "smollm2-135m-instruct"
HEADRACE = Path(sys.executable).with_name("headrace")
DATA_LIMIT_BYTES = 6_000_000 * 1024
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Server:
    """A running server. `url` is its root, `base_url` what an OpenAI client is given."""

    url: str
    port: int
    process: psutil.Popen
    log_path: Path

    @property
    def base_url(self) -> str:
        return self.url + "/v1"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        return self.process.children(recursive=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def health_status(url: str) -> int | None:
    """The status of GET /health; None when nothing listens."""
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_LIMIT_BYTES, DATA_LIMIT_BYTES))


@contextmanager
def running_server(
    log_path: Path,
    flags: Sequence[str] = (),
    *,
    command: Sequence[str] = ("serve",),
    clean_exit: bool = True,
    limit_memory: bool = True,
) -> Iterator[Server]:
    """Start `headrace COMMAND ... --port FREE FLAGS`, yield it once it is healthy, stop it with SIGTERM.

    With `clean_exit` the end asserts exit status 0 within STOP_TIMEOUT_S, no process left behind and no
    traceback in the log. `limit_memory` off is for GPUs, whose driver maps more than it
    uses. Raises AssertionError with the log's tail when the server does not start.
    """
    port = free_port()
    argv = [str(HEADRACE), *command, "--host", "127.0.0.1", "--port", str(port), *flags]
    with log_path.open("wb") as log:
        process = psutil.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_limit_memory if limit_memory else None,
        )
    server = Server(url=f"http://127.0.0.1:{port}", port=port, process=process, log_path=log_path)
    processes = [process]
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while health_status(server.url) != 200:
            assert process.poll() is None, f"exited {process.returncode} while starting: {argv}\n{server.log()[-6000:]}"
            assert time.monotonic() < deadline, f"not healthy after {START_TIMEOUT_S} s: {argv}\n{server.log()[-6000:]}"
            time.sleep(0.1)
        yield server
        processes += server.children() if process.is_running() else []
        stop(server, processes, clean_exit)
    finally:
        if process.poll() is None:
            processes += server.children()
        for survivor in {p.pid: p for p in processes}.values():
            if survivor.is_running():
                survivor.kill()
        psutil.wait_procs(processes, timeout=5)


def stop(server: Server, processes: Sequence[psutil.Process], clean_exit: bool) -> None:
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        status = server.process.wait(STOP_TIMEOUT_S)
    except psutil.TimeoutExpired:
        status = None
    if not clean_exit:
        return
    tail = server.log()[-6000:]
    assert status == 0, f"SIGTERM ended it with status {status} (None: not within {STOP_TIMEOUT_S} s)\n{tail}"
    _, left = psutil.wait_procs(processes, timeout=2)
    assert not left, f"left running: {left}\n{tail}"
    assert "Traceback (most recent call last)" not in server.log(), server.log()[-12000:]
