"""Starting a core process before its work is known.

A core takes a good part of a second to read its own code, whatever it is to serve. So a command starts one first
of all (`EarlyCore`), checks its flags and its model meanwhile, and sends it the settings then. A command that ends
without needing it ends it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

CORE_ENVIRONMENT = {
    # OpenMP threads that wait must sleep, not spin: the server needs the same processors between two steps.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Two heaps instead of one per thread, and freed memory goes back to the system.
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "PYTHONUNBUFFERED": "1",
}
"""How we start our own child, on top of the environment we were given."""


@dataclass(frozen=True, slots=True)
class StartedCore:
    """A core that waits for its settings, and the server's end of the socket that is its standard input."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def end(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


StartCore = Callable[[], StartedCore]


def start_core(module: str = "headrace.core") -> StartedCore:
    """Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid())],
                stdin=theirs.fileno(),
                env={**os.environ, **CORE_ENVIRONMENT},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return StartedCore(process, ours)


class EarlyCore:
    """Starts cores, the first of them at once; one that nobody wanted by the end of the `with` is ended."""

    def __init__(self) -> None:
        self._waiting: StartedCore | None = None
        # Whoever needs the core tries again, and is told then.
        with contextlib.suppress(OSError):
            self._waiting = start_core()

    def start(self) -> StartedCore:
        """The core that waits already, then one more each time. Raises OSError."""
        waiting, self._waiting = self._waiting, None
        return waiting or start_core()

    def __enter__(self) -> EarlyCore:
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting is not None:
            self._waiting.end()
