"""Starting a core process before its work is known.

A core takes a good part of a second to read its own code, whatever it is to serve. So a command starts one first
of all (`EarlyCore`), checks its flags and its model meanwhile, and gives it the settings then, on standard input.
A command that ends without needing it ends it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable

CORE_ENVIRONMENT = {
    # OpenMP threads that wait must sleep, not spin: the server needs the same processors between two steps.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Two heaps instead of one per thread, and freed memory goes back to the system.
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "PYTHONUNBUFFERED": "1",
}
"""How we start our own child, on top of the environment we were given."""


StartCore = Callable[[], "subprocess.Popen[bytes]"]


def start_core(module: str = "headrace.core") -> subprocess.Popen[bytes]:
    """A process that waits for its settings on the pipe to its standard input. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-m", module, str(os.getpid())],
        stdin=subprocess.PIPE,
        env={**os.environ, **CORE_ENVIRONMENT},
        start_new_session=True,
    )


class EarlyCore:
    """Starts cores, the first of them at once; one that nobody wanted by the end of the `with` is ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        # Whoever needs the core tries again, and is told then.
        with contextlib.suppress(OSError):
            self._process = start_core()

    def start(self) -> subprocess.Popen[bytes]:
        """The core that waits already, then one more each time. Raises OSError."""
        process, self._process = self._process, None
        return process or start_core()

    def __enter__(self) -> EarlyCore:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
