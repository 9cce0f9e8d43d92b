"""The engine as the HTTP server knows it: `generate()` and a state; the core behind it may die and come back.

A request is a stream of `SequenceOutput` (request_stream.py). When the core dies, requests of which nothing was
sent are done again by the next one (replay.py); the others get an error.

    loading ─► ready ─► restarting ─► ready ...        draining: no new requests, the running ones finish
       │         └► sleeping ─► ready ...
       └─► failed (it never came up: the message says what to change)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Collection
from typing import Literal

from headrace.config.settings import EngineSettings
from headrace.protocol import errors, ipc
from headrace.protocol.errors import ApiError
from headrace.server.core_controls import CoreControls
from headrace.server.core_start import StartCore, start_core
from headrace.server.engine_state import State, state_refusal
from headrace.server.metrics import EngineMetrics, RequestRecord
from headrace.server.replay import Replays
from headrace.server.request_stream import RequestStream
from headrace.server.room import Group, Room
from headrace.server.supervisor import Backoff, CoreProcess, Heartbeat, describe_exit

logger = logging.getLogger("headrace.server")

TICK_S = 0.25
STOP_PATIENCE_S = 1.0

SleepLevel = Literal[1, 2]


class StartupError(Exception):
    """The core could not start; the message says what to change."""


class EngineClient:
    """Owns the core process: starts it, watches it, restarts it, and carries requests to it and tokens back."""

    def __init__(
        self, settings: EngineSettings, metrics: EngineMetrics | None = None, *, start_core: StartCore = start_core
    ) -> None:
        """`start_core` gives a process that waits for its settings, at first and after every death."""
        self.settings = settings
        self.metrics = metrics if metrics is not None else EngineMetrics(settings.model)
        self.state: State = "loading"
        self.info: ipc.EngineInfo | None = None
        self.loading: ipc.Loading | None = None
        self.last_stats: ipc.StepStats | None = None
        self.num_restarts = 0
        self.failure: str | None = None
        self._start_core = start_core
        self._core: CoreProcess | None = None
        self._streams: dict[str, RequestStream] = {}
        self._room = Room(settings.max_num_queued_reqs, self._num_live, self.metrics)
        self.metrics.count_open = self._num_open
        self._replays = Replays()
        self._controls = CoreControls()
        self._heartbeat = Heartbeat(settings.step_timeout_s, TICK_S)
        self._started = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._stopping = False
        self._restart_at = 0.0
        self._last_death = ""
        self._stuck = ""
        """Why the core was ended from here, until its death is seen."""
        self.sleep_level: Literal[0, 1, 2] = 0
        self._changing_sleep = asyncio.Lock()
        self._woken: asyncio.Future[None] | None = None
        self._ready_at: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # life

    async def start(self) -> None:
        """Spawn the core and return; it loads in the background. `wait_ready` waits for it."""
        core = self._spawn()
        self._tasks = [asyncio.create_task(self._supervise(core)), asyncio.create_task(self._watch())]

    async def wait_ready(self) -> ipc.EngineInfo:
        """Until the first core is ready. Raises StartupError with the core's advice if it cannot start."""
        await self._started.wait()
        if self.info is None:
            raise StartupError(self.failure or "The engine was stopped while it was loading.")
        return self.info

    def begin_drain(self) -> None:
        """Refuse new requests from now on; the running ones go on."""
        self._draining = True
        if self.state != "failed":
            self.state = "draining"

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones. False if some were left after `timeout_s`."""
        self.begin_drain()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return not self._streams

    async def stop(self, patience_s: float = 1.0) -> None:
        """End the core; every open request gets an error. Safe to call twice and while loading."""
        self._stopping = True
        self.begin_drain()
        self._fail_all(errors.unavailable("draining", "The server is shutting down."))
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        core, self._core = self._core, None
        if core is not None:
            await core.stop(patience_s)
        self._started.set()

    def kill(self) -> None:
        """End the core this instant, without cleaning up."""
        if self._core is not None:
            self._core.kill()

    @property
    def healthy(self) -> bool:
        """Ready (draining, asleep as it was told), and, if work is pending, a step has finished lately."""
        return self.info is not None and self.state in ("ready", "draining", "sleeping") and not self._heartbeat.late

    @property
    def core_pid(self) -> int | None:
        return self._core.pid if self._core is not None and self._core.running else None

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    # requests

    async def generate(
        self,
        request_id: str,
        token_ids: list[int],
        params: ipc.SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        streamed: bool = True,
        group: Group | None = None,
    ) -> AsyncIterator[ipc.SequenceOutput]:
        """The outputs of all `params.n` sequences as they come, until each has its finish_reason.

        An output may carry the tokens of several steps if the caller was slow. Closing the iterator (or
        cancelling the task that reads it) aborts what still runs. `streamed` False promises that nothing is sent
        before all is there: such a request outlives the core's death at any time, others until their first output.
        `group`: what `let_in` gave, for one of several prompts.

        Raises ApiError: before the first output when the request is refused (400, 429, 503), at any time when the
        engine dies (503), the request itself kills it or its step fails (500).
        """
        self._accepting()
        if request_id in self._streams:
            raise errors.invalid_value("request_id", f"The request id {errors.quoted(request_id)} is in use.")
        message = ipc.AddRequest(
            request_id=request_id,
            token_ids=token_ids,
            params=params,
            arrival_s=time.time(),
            priority=priority,
            cache_salt=cache_salt,
            is_let_in=group is not None and group.is_begun,
            queued_tokens=None if group is None else group.num_tokens,
        )
        if group is not None:
            group.is_begun = True
            group.num_to_come = max(0, group.num_to_come - params.n)
        elif not message.is_background and self.info is not None:
            self._room.check(params.n, self.info)
        record = RequestRecord(num_prompt_tokens=len(token_ids), params=params, arrived=time.perf_counter())
        stream = RequestStream(message, record, streamed=streamed)
        self._streams[request_id] = stream
        self._idle.clear()
        try:
            if self._replays:
                self._replays.hold(stream)
                self._send_due()
            else:
                self._send(stream)
            while (output := await stream.next()) is not None:
                if output.finish_reason == "error":
                    raise errors.failed(output.error_code, output.error)
                yield output
        finally:
            self._forget(request_id, stream)

    def let_in(
        self, num_sequences: int, num_tokens: int, *, priority: int = 0
    ) -> contextlib.AbstractContextManager[Group]:
        """Places for all sequences of a request with several prompts. Raises ApiError (503), and, where it is entered,
        429."""
        self._accepting()
        assert self.info is not None
        return self._room.group(num_sequences, num_tokens, self.info, priority=priority)

    def _num_live(self) -> int:
        return sum(len(stream.open) for stream in self._streams.values() if not stream.message.is_background)

    def _num_open(self) -> int:
        """Sequences that nobody has had the end of, those that are let in and not sent yet among them."""
        return sum(len(s.open) for s in self._streams.values() if s.error is None) + self._room.num_to_come

    def abort(self, request_id: str, index: int | None = None, reason: ipc.FinishReason = "abort") -> None:
        """Stop a sequence, or all of the request; its stream goes on (or ends) without it.

        `reason` is what the metrics count: "stop" when the text held a stop string, for instance.
        """
        stream = self._streams.get(request_id)
        if stream is None or self._core is None:
            return
        indexes = list(stream.open) if index is None else [index]
        closed = [i for i in indexes if stream.close_sequence(i)]
        if closed:
            for _ in closed:
                self.metrics.sequence_finished(reason)
            if stream.in_core:
                self._core.send(ipc.AbortRequest(request_id=request_id, index=index))

    def abort_requests(self, ids: Collection[str] | None) -> list[str]:
        """End open requests, as finished for the reason "abort": those of these ids, a completion's id meaning all of
        its prompts (`cmpl-1` for `cmpl-1-0`), or with None all. Returns their own ids."""
        ended = []
        for request_id, stream in list(self._streams.items()):
            known = ids is None or request_id in ids or request_id.rpartition("-")[0] in ids
            if stream.is_over or not known:
                continue
            for index in sorted(stream.open):
                self.metrics.sequence_finished("abort")
                stream.push(ipc.SequenceOutput(request_id=request_id, index=index, token_ids=[], finish_reason="abort"))
            if stream.in_core and self._core is not None:
                self._core.send(ipc.AbortRequest(request_id=request_id))
            ended.append(request_id)
        return ended

    async def control(self, action: ipc.ControlAction, path: str | None = None) -> int:
        """What the core answers (see `ipc.Control`). Raises ApiError: 503 without a core, 409 when it says no."""
        return await self._control(self._accepting(), action, path)

    async def _control(self, core: CoreProcess, action: ipc.ControlAction, path: str | None = None) -> int:
        message, answer = self._controls.new(action, path)
        core.send(message)
        return await answer

    # sleep

    async def sleep(self, level: SleepLevel, *, abort: bool) -> None:
        """Take no requests and give memory back: the KV cache (level 1), or all that the core has (2), by ending it.

        Open requests get an error with `abort`, else they may finish first. Sleeping deeper is possible, less deep
        only by waking up. Raises ApiError (503) when there is no core to send to sleep.
        """
        async with self._changing_sleep:
            if self.sleep_level >= level:
                return
            if self.state != "sleeping":
                self._accepting()
                self.state = "sleeping"
                if abort:
                    self._abort_all(errors.unavailable("sleeping", "The engine was sent to sleep."))
                await self._idle.wait()
            if self.sleep_level >= level:  # the core died meanwhile
                return
            core = self._core
            if self.state != "sleeping" or core is None:
                raise self.refusal() or errors.unavailable("engine_restarting", "The engine is being restarted.")
            if level == 1:
                await self._control(core, "release_kv_cache")
            else:
                self._core = None
                await core.stop(STOP_PATIENCE_S)
            self.sleep_level = self.metrics.sleep_level = level
            logger.info("The engine sleeps, level %d.", level)

    async def wake_up(self) -> None:
        """Undo `sleep`; returns when requests are taken. Raises ApiError (503, 409) when it sleeps on, saying why."""
        async with self._changing_sleep:
            if self.state != "sleeping":
                return
            started = time.monotonic()
            if self._core is not None:
                await self._control(self._core, "restore_kv_cache")
                self._awake()
            else:
                self._woken = asyncio.get_running_loop().create_future()
                self._tasks.append(asyncio.create_task(self._supervise(self._spawn())))
                await self._woken
            logger.info("The engine is awake after %.1f s.", time.monotonic() - started)

    def _awake(self) -> None:
        self.sleep_level = self.metrics.sleep_level = 0
        if not self._draining:
            self.state = "ready"
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _abort_all(self, error: ApiError) -> None:
        for stream in list(self._streams.values()):
            if stream.in_core and not stream.is_over and self._core is not None:
                self._core.send(ipc.AbortRequest(request_id=stream.message.request_id))
            stream.fail(error)

    def refusal(self) -> ApiError | None:
        """Why no request is taken now; None when requests are."""
        wait_s = self._restart_at - time.monotonic()
        return state_refusal(self.state, loading=self.loading, last_death=self._last_death, restart_in_s=wait_s)

    def _accepting(self) -> CoreProcess:
        refusal = self.refusal()
        if refusal is not None or self._core is None:
            raise refusal or errors.unavailable("engine_restarting", "The engine is being restarted.")
        return self._core

    def _send(self, stream: RequestStream) -> None:
        """Give a request to the core; of one that is done again only the sequences that had not ended."""
        assert self._core is not None
        stream.in_core = True
        self._core.send(stream.message)
        for index in range(stream.message.params.n):
            if index not in stream.open:
                self._core.send(ipc.AbortRequest(request_id=stream.message.request_id, index=index))

    def _send_due(self) -> None:
        if self._replays and self._core is not None and self.state in ("ready", "draining"):
            for stream in self._replays.due():
                self._send(stream)

    def _forget(self, request_id: str, stream: RequestStream) -> None:
        self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()
        if stream.open:
            if self._core is not None and stream.in_core and stream.error is None:
                self._core.send(ipc.AbortRequest(request_id=request_id))
            if not stream.refused:
                for _ in stream.open:
                    self.metrics.sequence_finished("error" if stream.error is not None else "abort")
            stream.open.clear()
        if not stream.refused:
            self.metrics.request_finished(stream.record)
        self._send_due()

    def _fail_all(self, error: ApiError) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
        self._controls.fail_all(error)
        if self._woken is not None and not self._woken.done():
            self._woken.set_exception(error)

    # messages

    def _on_message(self, message: ipc.FromCore) -> None:
        match message:
            case ipc.StepOutput(outputs=outputs, stats=stats):
                now = time.perf_counter()
                self._heartbeat.beat(stats.step_s)
                self.last_stats = stats
                self.metrics.step(stats)
                for output in outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is not None and output.index in stream.open:
                        fresh = stream.push(output)
                        if fresh is not None:
                            self.metrics.output(stream.record, fresh, now)
                self._send_due()
            case ipc.Refused(request_id=request_id):
                self._heartbeat.beat()
                if (stream := self._streams.get(request_id)) is not None:
                    self.metrics.refused(message.code)
                    stream.refuse(errors.refused(message.code, message.message, message.param))
                    self._send_due()
            case ipc.Controlled():
                self._controls.answered(message)
            case ipc.Loading():
                self.loading = message
            case ipc.Ready(info=info):
                self.info = info
                self.loading = None
                self.metrics.engine_ready(info, self.settings)
                self._heartbeat = Heartbeat(self.settings.step_timeout_s, TICK_S)
                self._ready_at = time.monotonic()
                self._awake()
                self._started.set()
                self._send_due()
            case ipc.Failed(message=text):
                self.failure = text

    # supervision

    async def _supervise(self, core: CoreProcess) -> None:
        backoff = Backoff()
        while True:
            status = await core.wait()
            if self._stopping or core is not self._core:
                return
            core.close()
            self._core = None
            reason = f"The engine process {self._stuck or describe_exit(status)}"
            self._stuck = ""
            if self.state == "sleeping":
                self._died_asleep(reason)
                return
            if self.info is None:
                self.failure = self.failure or f"{reason} while it was loading."
                self.state = "failed"
                self._started.set()
                return
            self.metrics.core_lost()
            was_ready = self._ready_at is not None
            ready_s = time.monotonic() - self._ready_at if self._ready_at is not None else 0.0
            self._ready_at = None
            delay_s = backoff.after_death(ready_s)
            self._restart_at = time.monotonic() + delay_s
            self._last_death = reason
            self.num_restarts += 1
            if not self._draining:
                self.state = "restarting"
            num_open = len(self._streams)
            num_failed = self._after_death(reason, was_ready)
            logger.error(
                "%s. Of %d open requests %d fail and %d are done again; restart %d in %.1f s.",
                reason, num_open, num_failed, num_open - num_failed, self.num_restarts, delay_s,
            )  # fmt: skip
            if self.failure is not None:
                logger.error("%s", self.failure)
                self.failure = None
            await asyncio.sleep(delay_s)
            core = await self._respawn(backoff)

    def _died_asleep(self, reason: str) -> None:
        """Nobody needs a core now: the next one is started by waking up. It may have died of just that."""
        logger.error("%s while the engine slept; waking up starts another. %s", reason, self.failure or "")
        advice = errors.unavailable("sleeping", self.failure or f"{reason} before it was awake. The engine sleeps on.")
        self.failure = None
        self.sleep_level = self.metrics.sleep_level = 2
        self._fail_all(advice)

    def _after_death(self, reason: str, was_ready: bool) -> int:
        """Fail the requests that cannot be done again; how many. A core that died while it loaded leaves no hope."""
        lost = errors.unavailable("engine_restarting", f"{reason} before this request was done. Send it again.")
        self._controls.fail_all(lost)
        before = [stream for stream in self._streams.values() if not stream.is_over]
        for stream in before:
            if not was_ready or (stream.in_core and not stream.repeatable):
                stream.fail(lost)
        for stream in self._replays.after_death([stream for stream in before if not stream.is_over]):
            logger.error("Request %s was there at %d deaths and fails.", stream.message.request_id, stream.num_deaths)
            stream.fail(errors.request_kills_engine(stream.num_deaths))
        return sum(stream.is_over for stream in before)

    async def _respawn(self, backoff: Backoff) -> CoreProcess:
        while True:
            try:
                return self._spawn()
            except OSError as error:
                delay_s = backoff.after_death(0.0)
                logger.error("The engine process cannot be started (%s); next try in %.1f s.", error, delay_s)
                await asyncio.sleep(delay_s)

    def _spawn(self) -> CoreProcess:
        self._core = core = CoreProcess(self._start_core(), self.settings, self._on_message)
        self.metrics.core_pid = core.pid
        return core

    async def _watch(self) -> None:
        was_late = False
        while True:
            await asyncio.sleep(TICK_S)
            core = self._core
            if core is None:
                continue
            core.receive_pending()
            beat = self._heartbeat
            # Not those that have all their tokens and a reader who does not take them.
            num_pending = sum(stream.in_core and not stream.is_over for stream in self._streams.values())
            beat.tick(time.monotonic(), pending=num_pending > 0 and self.state in ("ready", "draining", "sleeping"))
            if beat.late and not was_late:
                logger.error(
                    "No step has finished for %.1f s while %d requests wait (limit %.1f s): /health answers 503.",
                    beat.silent_s,
                    num_pending,
                    beat.timeout_s,
                )
            was_late = beat.late
            if beat.dead:
                self._stuck = f"was stuck (no step finished for {beat.silent_s:.1f} s) and was ended"
                logger.error("The engine is stuck (%.1f s without a step): it is killed.", beat.silent_s)
                core.kill()
                beat.beat()
