"""One life of the core process as the server sees it, and the rules for judging and restarting it.

`CoreProcess` takes a `python -m headrace.core` (never a fork: threads and torch do not survive that) and the socket
that is its standard input: first it sends the settings, then both exchange messages. The end of the socket tells the
core that it is alone. Every life has its own, so nothing of a dead core can reach the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable

import msgspec

from headrace.config.settings import EngineSettings
from headrace.protocol import ipc
from headrace.protocol.message_socket import MessageSocket, PeerGone
from headrace.server.core_start import StartedCore

logger = logging.getLogger("headrace.server")


class CoreProcess:
    """A running core. `on_message` is called in the event loop for every message, in order."""

    def __init__(
        self, started: StartedCore, settings: EngineSettings, on_message: Callable[[ipc.FromCore], None]
    ) -> None:
        self._process = started.process
        self._socket = MessageSocket(started.socket)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._closed = False
        self._loop.add_reader(self._socket, self._receive)
        threading.Thread(target=self._reap, name="core-exit", daemon=True).start()
        self._send(msgspec.msgpack.encode(settings))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def send(self, message: ipc.ToCore) -> None:
        """Never blocks; what is sent to a dead core is lost, and its exit says so."""
        if not self._closed:
            self._send(ipc.encode(message))

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
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()

    def _reap(self) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it everyone who waits
            self._loop.call_soon_threadsafe(self._ended.set)

    def _send(self, payload: bytes) -> None:
        with contextlib.suppress(PeerGone):
            if not self._socket.send(payload):
                self._loop.add_writer(self._socket, self._flush)

    def _flush(self) -> None:
        is_done = True
        with contextlib.suppress(PeerGone):
            is_done = self._socket.flush()
        if is_done:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        while not self._closed:
            try:
                payload = self._socket.receive()
            except PeerGone:
                self._loop.remove_reader(self._socket)
                return
            if payload is None:
                return
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
