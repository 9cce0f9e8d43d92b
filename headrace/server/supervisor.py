"""One life of the core process as the server sees it, and the rules for judging and restarting it.

`CoreProcess` takes a `python -m headrace.core` (never a fork: threads and torch do not survive that), gives it the
settings on its standard input, and exchanges messages over a ZeroMQ socket in a private directory. The pipe to its
standard input stays open for as long as the server lives, so its end tells the core that it is alone. Every life
has its own socket, so nothing of a dead core can reach the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import zmq

from headrace.config.settings import EngineSettings
from headrace.protocol import ipc

logger = logging.getLogger("headrace.server")


class CoreProcess:
    """A running core. `on_message` is called in the event loop for every message, in order."""

    def __init__(
        self, process: subprocess.Popen[bytes], settings: EngineSettings, on_message: Callable[[ipc.FromCore], None]
    ) -> None:
        """`process` waits for its settings (`start_core`) and belongs to this object, whatever happens here."""
        self._process = process
        self._directory: Path | None = None
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._ended = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="headrace-"))  # mode 0700
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SNDHWM, 0)
            address = f"ipc://{self._directory}/core.sock"
            self._socket.bind(address)
            payload = msgspec.msgpack.encode(ipc.Start(address=address, settings=settings))
            assert process.stdin is not None
            # A core that died before reading is reported by its exit, not here.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(struct.pack("<I", len(payload)) + payload)
                process.stdin.flush()
        except BaseException:
            process.kill()
            process.wait()
            self._close_socket()
            raise
        self._descriptor = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._receive)
        self._loop.call_soon(self._receive)
        threading.Thread(target=self._reap, name="core-exit", daemon=True).start()

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
        await self._ended.wait()
        self._receive()
        return self._process.wait()

    def kill(self) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self, patience_s: float) -> None:
        """Ask it to leave, kill it after `patience_s`, and clean up."""
        if self.running and patience_s > 0:
            self.send(ipc.Stop())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), patience_s)
        self.kill()
        await self._ended.wait()
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._close_socket()

    def _close_socket(self) -> None:
        self._socket.close()
        self._context.term()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _reap(self) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it everyone who waits
            self._loop.call_soon_threadsafe(self._ended.set)

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
