"""One life of the core process as the server sees it, and the rules for judging and restarting it.

`CoreProcess` spawns `python -m headrace.core` (never forks: threads and torch do not survive that), gives it the
settings on its standard input, and exchanges messages over a ZeroMQ socket in a private directory. The pipe to its
standard input stays open for as long as the server lives, so its end tells the core that it is alone. Every life
has its own socket, so nothing of a dead core can reach the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import zmq

from headrace.config.settings import EngineSettings
from headrace.protocol import ipc

logger = logging.getLogger("headrace.server")

CORE_ENVIRONMENT = {
    # OpenMP threads that wait must sleep, not spin: the server needs the same processors between two steps.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Two heaps instead of one per thread, and freed memory goes back to the system.
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "PYTHONUNBUFFERED": "1",
}
"""How we start our own child, on top of the environment we were given."""


class CoreProcess:
    """A running core. `on_message` is called in the event loop for every message, in order."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        directory: Path,
        on_message: Callable[[ipc.FromCore], None],
    ) -> None:
        self._process = process
        self._context = context
        self._socket = socket
        self._directory: Path | None = directory
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._descriptor = cast(int, socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._receive)
        self._loop.call_soon(self._receive)

    @classmethod
    async def spawn(
        cls, settings: EngineSettings, on_message: Callable[[ipc.FromCore], None], module: str = "headrace.core"
    ) -> CoreProcess:
        directory = Path(tempfile.mkdtemp(prefix="headrace-"))  # mode 0700
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.PAIR)
        process: asyncio.subprocess.Process | None = None
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            address = f"ipc://{directory}/core.sock"
            socket.bind(address)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                address,
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                env={**os.environ, **CORE_ENVIRONMENT},
                start_new_session=True,
            )
            payload = msgspec.msgpack.encode(settings)
            assert process.stdin is not None
            process.stdin.write(struct.pack("<I", len(payload)) + payload)
            # A core that dies before reading is reported by its exit, not here.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await process.stdin.drain()
        except BaseException:
            if process is not None and process.returncode is None:
                process.kill()
            socket.close()
            context.term()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return cls(process, context, socket, directory, on_message)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def send(self, message: ipc.ToCore) -> None:
        """Never blocks; what is sent to a dead core is lost."""
        if self._closed:
            return
        with contextlib.suppress(zmq.Again):
            self._socket.send(ipc.encode(message), zmq.NOBLOCK)
        # Sending may swallow the socket's edge-triggered "readable" event.
        if self._readable:
            self._loop.call_soon(self._receive)

    def receive_pending(self) -> None:
        """Deliver what has arrived already, without waiting for the event loop's next turn."""
        self._receive()

    async def wait(self) -> int:
        """The exit status once the process is gone, after its last messages were delivered."""
        status = await self._process.wait()
        self._receive()
        return status

    def kill(self) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self, patience_s: float) -> None:
        """Ask it to leave, kill it after `patience_s`, and clean up."""
        if self.running and patience_s > 0:
            self.send(ipc.Stop())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), patience_s)
        self.kill()
        await self._process.wait()
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._socket.close()
        self._context.term()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _readable(self) -> bool:
        return bool(cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _receive(self) -> None:
        while not self._closed and self._readable:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if self._directory is not None:
                # Both ends are connected: nothing needs the address any more, whatever becomes of this process.
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None
            try:
                self._on_message(ipc.from_core_decoder.decode(payload))
            except Exception:
                # One message that cannot be used must not cost the ones behind it.
                logger.exception("A message of %d bytes from the engine could not be used.", len(payload))


def describe_exit(status: int) -> str:
    """An exit status in words, with what usually causes it."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    if -status == signal.SIGKILL:
        return f"was killed ({name}); if nobody did that, the system ran out of memory: lower --kv-cache-memory-bytes"
    return f"died of {name}"


class Backoff:
    """Seconds to wait before the next restart: 0.5, 1, 2, 4 ... 30, from the beginning after a minute of health."""

    FIRST_S = 0.5
    LONGEST_S = 30.0
    HEALTHY_S = 60.0

    def __init__(self) -> None:
        self._next_s = self.FIRST_S

    def after_death(self, healthy_s: float) -> float:
        """`healthy_s`: how long the core that just died had been ready."""
        if healthy_s >= self.HEALTHY_S:
            self._next_s = self.FIRST_S
        delay_s = self._next_s
        self._next_s = min(self.LONGEST_S, 2 * delay_s)
        return delay_s


class Heartbeat:
    """Tells a core that is stuck from one that is busy: work is pending and no step has finished for too long.

    The caller ticks it at a steady interval. Only ticked time counts, and no tick counts for more than two
    intervals, so that a server that was itself stopped or starved does not blame the core for it.
    """

    SHORTEST_S = 30.0
    STEPS = 20
    """A step may take this many times as long as the steps before it."""

    def __init__(self, step_timeout_s: float | None, interval_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._interval_s = interval_s
        self._usual_step_s = 0.0
        self._silent_s = 0.0
        self._ticked_at: float | None = None

    @property
    def timeout_s(self) -> float:
        if self._step_timeout_s is not None:
            return self._step_timeout_s
        return max(self.SHORTEST_S, self.STEPS * self._usual_step_s)

    @property
    def silent_s(self) -> float:
        """Seconds with work pending since the last sign of life."""
        return self._silent_s

    @property
    def late(self) -> bool:
        return self._silent_s > self.timeout_s

    @property
    def dead(self) -> bool:
        return self._silent_s > 2 * self.timeout_s

    def beat(self, step_s: float | None = None) -> None:
        """Something came from the core; `step_s` is the length of the step that it reports."""
        self._silent_s = 0.0
        if step_s is not None:
            self._usual_step_s = max(step_s, 0.9 * self._usual_step_s + 0.1 * step_s)

    def tick(self, now: float, pending: bool) -> None:
        if self._ticked_at is not None and pending:
            self._silent_s += min(now - self._ticked_at, 2 * self._interval_s)
        if not pending:
            self._silent_s = 0.0
        self._ticked_at = now
