"""The engine process: joins policy (engine) and device (runtime), one step after another.

    python -m headrace.core PARENT_PID      standard input is a socket: first the settings, then messages both ways

Each turn of the loop takes all messages that have arrived, runs one step, and sends one message with its
outputs: the server's heartbeat. With nothing to do it sleeps until a message or the end of the socket
comes; the end means that the server is gone, and so the core goes too. `EngineCore` is the same in process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import logging
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import msgspec

from headrace.config.errors import ConfigError
from headrace.config.model_files import open_model
from headrace.config.settings import EngineSettings
from headrace.engine.plan import Plan
from headrace.engine.scheduler import Refusal, Scheduler, SchedulerSettings
from headrace.planner.memory import MemoryPlan, plan_memory
from headrace.protocol import ipc
from headrace.protocol.message_socket import MessageSocket, PeerGone
from headrace.runtime.core_process import die_with_parent
from headrace.runtime.devices import DeviceLost, choose_kernels, instruction_set, thread_notes
from headrace.runtime.grammar_gate import GrammarGate
from headrace.runtime.grammar_store import GrammarStore, compiler_of
from headrace.runtime.memory import device_memory_bytes, measure
from headrace.runtime.pooling import Pooling
from headrace.runtime.profile import StepProfile
from headrace.runtime.runner import BrokenSequences, Runner

logger = logging.getLogger("headrace.core")

Progress = Callable[[str, int, int], None]
"""(phase, done, total), called often while the core starts."""

STEP_TIME_TARGET_S = {"reference": 0.5}
"""By the kernels' name: how long a step may take while somebody waits for the next token."""
DEFAULT_STEP_TIME_TARGET_S = 0.1

SHRINK = 0.75
"""What is left of the KV cache after each attempt to allocate it that failed."""


class EngineCore:
    """A loaded model with its scheduler: add requests, step until `has_work` is False.

    Loads in the constructor. Raises ConfigError when the settings, the model and the memory do not go together.
    """

    def __init__(self, settings: EngineSettings, progress: Progress = lambda phase, done, total: None) -> None:
        self.settings = settings
        phases = _Phases()
        with phases.measure("model files"):
            files = open_model(Path(settings.model), settings.hf_overrides)
            if settings.pooler is not None:
                config = msgspec.structs.replace(files.config, has_output=False)
                files = dataclasses.replace(files, config=config)
        with phases.measure("device"):
            kernels = choose_kernels(settings, files.config)
        memory_bytes, taken_bytes = device_memory_bytes(kernels.device)
        self._grammars = GrammarStore(lambda: compiler_of(files, settings.tokenizer))
        pooling = None if settings.pooler is None else Pooling(settings.pooler, files.config)
        self._runner = Runner(files, kernels, self._grammars.find, pooling)
        with phases.measure("weights"):
            self._runner.load(
                lambda done, total: progress("Loading model weights", done, total), settings.max_model_len
            )
        step_bytes = None
        if kernels.device == "cuda":
            with phases.measure("trial step"):
                taken_bytes, step_bytes = measure(self._runner, settings)
        with phases.measure("KV cache"):
            plan = self._allocate(memory_bytes, taken_bytes, step_bytes)
        step_time_target_s = settings.step_time_target_s or STEP_TIME_TARGET_S.get(
            kernels.name, DEFAULT_STEP_TIME_TARGET_S
        )
        self._scheduler = Scheduler(
            SchedulerSettings(
                max_num_seqs=plan.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                max_model_len=plan.max_model_len,
                num_blocks=plan.num_blocks,
                block_size=plan.block_size,
                windows=tuple(group.window for group in files.config.layer_groups),
                num_host_blocks=plan.num_host_blocks,
                enable_prefix_caching=settings.enable_prefix_caching and not files.config.is_encoder,
                enable_chunked_prefill=settings.enable_chunked_prefill and not files.config.is_encoder,
                policy=settings.scheduling_policy,
                max_num_queued_reqs=settings.max_num_queued_reqs,
                max_num_queued_tokens=settings.max_num_queued_tokens,
                step_time_target_s=step_time_target_s,
            )
        )
        self.gate = GrammarGate(self._grammars, self._scheduler)
        self.info = ipc.EngineInfo(
            model=settings.model,
            family=files.config.family,
            device=kernels.device,
            dtype=kernels.dtype,
            kernels=kernels.name,
            instruction_set=instruction_set(kernels.device),
            threads=kernels.threads,
            weight_bytes=kernels.weight_bytes,
            kv_cache_bytes=plan.kv_cache_bytes,
            kv_cache_dtype=kernels.kv_cache_dtype,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            kv_cache_tokens=plan.kv_cache_tokens,
            num_host_blocks=plan.num_host_blocks,
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            step_time_target_s=step_time_target_s,
            gives="text" if settings.pooler is None else settings.pooler.describe(),
            vector_width=0 if settings.pooler is None else files.config.hidden_size,
            phase_seconds=phases.seconds,
            notes=[*plan.notes, *thread_notes(kernels)],
        )

    @property
    def has_work(self) -> bool:
        """A step can be done."""
        return self._scheduler.has_work

    def add(self, request: ipc.AddRequest) -> Refusal | None:
        """Queue a request; a Refusal if it can never run or the queue is full. One with a grammar is queued when that
        is compiled, by `step`, and may be refused then: see `gate`."""
        if (request.params.pooling is None) != (self.settings.pooler is None):
            kind = "generates text" if self.settings.pooler is None else "gives vectors or scores"
            return Refusal("invalid_request", f"This engine {kind}, and the request asks for something else.")
        return self.gate.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a sequence, or all of a request; one that is not known is no error."""
        self._scheduler.abort(request_id, index)
        if index is None:
            self.gate.forget(request_id)
        else:
            self.gate.ended(request_id)

    def reset_prefix_cache(self) -> int:
        """Forget cached blocks that no sequence holds; how many there were."""
        return self._scheduler.reset_prefix_cache()

    def release_kv_cache(self) -> int:
        """Give the KV cache's memory back until `restore_kv_cache`; its bytes. Nothing may be added meanwhile."""
        while self.has_work and self.step() is not None:
            pass
        self._scheduler.reset_prefix_cache()
        self._runner.release_kv_cache()
        return_freed_memory()
        return self.info.kv_cache_bytes

    def restore_kv_cache(self) -> int:
        """Take the memory again; its bytes. Raises MemoryError or RuntimeError when it is not there."""
        self._runner.allocate_kv_cache(self.info.num_blocks, self.info.block_size)
        return self.info.kv_cache_bytes

    def check_integrity(self) -> None:
        """Raises AssertionError if the scheduler's books do not add up."""
        self._scheduler.check_integrity()

    def step(self) -> ipc.StepOutput | None:
        """One step: schedule, execute, update. None if there was nothing to do.

        A step that raises is done again in halves, until only what is at fault ends (finish_reason "error").
        """
        self.gate.open()
        started = time.perf_counter()
        plan = self._scheduler.schedule()
        if plan is None:
            return None
        outputs = self._execute(plan)
        for output in outputs:
            if output.finish_reason is not None:
                self.gate.ended(output.request_id)
        stats = self._scheduler.stats(time.perf_counter() - started)
        if self.settings.trace_steps:
            logger.info("%s", trace_line(plan, stats))
        return ipc.StepOutput(outputs=outputs, stats=stats)

    def _execute(self, plan: Plan) -> list[ipc.SequenceOutput]:
        try:
            result = self._runner.execute(plan)
        except DeviceLost:
            raise  # no request is at fault, and only another process can do them again
        except Exception as error:
            guilty = frozenset(error.seq_ids) if isinstance(error, BrokenSequences) else frozenset()
            if len(plan.steps) > 1 and len(guilty) < len(plan.steps):
                logger.warning("Step %d failed (%s); it is done in parts.", plan.step, one_line(error))
                return [output for part in parts(plan, guilty) for output in self._execute(part)]
            logger.exception("Step %d failed and %d sequences with it.", plan.step, len(plan.steps))
            return self._scheduler.fail(plan, told(error))
        return self._scheduler.update(plan, result)

    def _allocate(self, memory_bytes: int, taken_bytes: int, step_bytes: int | None) -> MemoryPlan:
        """Plan the KV cache and allocate it; an allocation that fails is tried again smaller, and told."""
        settings, kernels = self.settings, self._runner.kernels
        notes: list[str] = []
        while True:
            plan = plan_memory(
                self._runner.files.config,
                settings,
                weight_bytes=kernels.weight_bytes,
                available_bytes=memory_bytes,
                kv_cache_dtype=kernels.kv_cache_dtype,
                overhead_bytes=taken_bytes,
                step_bytes=step_bytes,
                device="cuda" if kernels.device == "cuda" else "cpu",
                host_bytes=device_memory_bytes("cpu")[0],
            )
            try:
                self._runner.allocate_kv_cache(plan.num_blocks, plan.block_size)
            except (MemoryError, RuntimeError) as error:
                smaller = int(SHRINK * plan.kv_cache_bytes)
                note = f"The KV cache got {smaller >> 20} MiB: {plan.kv_cache_bytes >> 20} MiB could not be allocated."
                logger.warning("%s (%s)", note, one_line(error))
                notes = [note]
                settings = msgspec.structs.replace(settings, kv_cache_memory_bytes=smaller)
            else:
                return dataclasses.replace(plan, notes=(*notes, *plan.notes))


class _Phases:
    """Seconds that each phase of the start took, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def parts(plan: Plan, guilty: Set[int]) -> list[Plan]:
    """A plan that failed as plans that do the same: its halves, or the sequences at fault apart from the rest.

    What is dropped goes with the first; a new sequence and its copied block go with the step that uses them. Saves are
    done, and must not be again: the blocks may hold something else by now.
    """
    if guilty:
        groups = [[s for s in plan.steps if (s.seq_id in guilty) is chosen] for chosen in (False, True)]
    else:
        middle = len(plan.steps) // 2
        groups = [list(plan.steps[:middle]), list(plan.steps[middle:])]
    divided = []
    for place, steps in enumerate(group for group in groups if group):
        ids = {step.seq_id for step in steps}
        blocks = {block_id for step in steps for own in step.new_block_ids for block_id in own}
        divided.append(
            msgspec.structs.replace(
                plan,
                dropped=plan.dropped if place == 0 else (),
                new=tuple(new for new in plan.new if new.seq_id in ids),
                block_copies=tuple(pair for pair in plan.block_copies if pair[1] in blocks),
                steps=tuple(steps),
                saves=(),
                continues=False,
            )
        )
    return divided


def told(error: BaseException) -> str:
    """Why a request failed, for its client."""
    if isinstance(error, BrokenSequences):
        return (
            "The model computed values that are not numbers (NaN) for this request. If others fail like this, its "
            "weights are damaged or its --dtype is too small for them: --dtype float32 holds everything."
        )
    return f"The engine failed on this request: {one_line(error)}"


def one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def trace_line(plan: Plan, stats: ipc.StepStats) -> str:
    """`step 7: 2 decode + 1 prefill = 66 tokens, 31.4 ms; 3 running, 0 waiting; 12/2912 blocks`"""
    reason = f" for {stats.waiting_reason}" if stats.waiting_reason else ""
    return (
        f"step {plan.step}: {stats.num_decode_tokens} decode + {stats.num_prefill_tokens} prefill tokens in "
        f"{len(plan.steps)} sequences ({len(plan.new)} new, {len(plan.dropped)} dropped), "
        f"{1000 * stats.step_s:.1f} ms; {stats.num_running} running, {stats.num_waiting} waiting{reason}; "
        f"{stats.kv_blocks_used}/{stats.kv_blocks_total} blocks"
    )


class CoreLoop:
    """The core's side of the conversation with the server."""

    STUCK_WAIT_S = 0.1
    """Between two looks at work that cannot be scheduled; it never should come to that."""

    def __init__(self, server: MessageSocket) -> None:
        self._server = server
        self._poll = select.poll()
        self._poll.register(server, select.POLLIN)
        self._profile = StepProfile()

    def send(self, message: ipc.FromCore) -> None:
        """Waits while the server takes nothing. Raises PeerGone when it never will again."""
        if not self._server.send(ipc.encode(message)):
            while not self._server.flush():
                self._server.wait(None, to_send=True)

    def run(self, core: EngineCore) -> None:
        """Until Stop comes or the server is gone."""
        try:
            self._run(core)
        except PeerGone:
            logger.warning("The server is gone; the engine ends.")

    def _run(self, core: EngineCore) -> None:
        wait_s: float | None = None
        self._poll.register(core.gate.wake, select.POLLIN)
        while self._receive(core, wait_s):
            output = core.step()
            for request_id, refusal in core.gate.take_refused():
                self._send_refused(request_id, refusal)
            has_work = core.has_work
            wait_s = 0.0 if has_work else None
            if output is not None:
                self.send(output)
                if not has_work:
                    self._check(core)
            elif has_work:
                logger.error("Requests wait and none can be scheduled: this is a fault of the scheduler.")
                wait_s = self.STUCK_WAIT_S

    def _receive(self, core: EngineCore, wait_s: float | None) -> bool:
        """Act on all messages there are, after waiting for the first. False: leave the loop. Raises PeerGone."""
        if not self._poll.poll(None if wait_s is None else 1000 * wait_s):
            return True  # nothing came; to ask the socket would cost an exception more
        while (payload := self._server.receive()) is not None:
            try:
                message = ipc.to_core_decoder.decode(payload)
            except msgspec.MsgspecError:
                logger.exception("A message of %d bytes is not understood and is left out.", len(payload))
                continue
            if isinstance(message, ipc.Stop):
                return False
            self._act(core, message)
        return True

    def _act(self, core: EngineCore, message: ipc.AddRequest | ipc.AbortRequest | ipc.Control) -> None:
        match message:
            case ipc.AddRequest(request_id=request_id):
                try:
                    refusal = core.add(message)
                except Exception as error:
                    logger.exception("Request %s cannot be taken in.", request_id)
                    text = f"The engine failed on this request: {one_line(error)}"
                    return self.send(ipc.Refused(request_id=request_id, code="engine_error", message=text))
                if refusal is not None:
                    self._send_refused(request_id, refusal)
            case ipc.AbortRequest(request_id=request_id, index=index):
                core.abort(request_id, index)
            case ipc.Control(number=number):
                self.send(self._controlled(core, number, message))

    def _controlled(self, core: EngineCore, number: int, control: ipc.Control) -> ipc.Controlled:
        try:
            match control.action:
                case "reset_prefix_cache":
                    return ipc.Controlled(number=number, count=core.reset_prefix_cache())
                case "release_kv_cache":
                    return ipc.Controlled(number=number, count=core.release_kv_cache())
                case "restore_kv_cache":
                    return ipc.Controlled(number=number, count=core.restore_kv_cache())
                case "start_profile":
                    self._profile.start()
                case "stop_profile":
                    self._profile.stop(Path(control.path or ""))
        except ValueError as error:
            return ipc.Controlled(number=number, error=str(error))
        except Exception as error:
            logger.exception("%s failed.", control.action)
            return ipc.Controlled(number=number, error=f"{control.action} failed: {one_line(error)}")
        return ipc.Controlled(number=number)

    def _send_refused(self, request_id: str, refusal: Refusal) -> None:
        self.send(ipc.Refused(request_id=request_id, code=refusal.code, message=refusal.message, param=refusal.param))

    def _check(self, core: EngineCore) -> None:
        try:
            core.check_integrity()
        except AssertionError:
            logger.exception("The scheduler's books do not add up while it is idle; blocks may have been lost.")


class ThrottledProgress:
    """Sends Loading messages, at most one every `INTERVAL_S`, and always the last of a phase."""

    INTERVAL_S = 0.1

    def __init__(self, send: Callable[[ipc.FromCore], None]) -> None:
        self._send = send
        self._sent_at = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._sent_at >= self.INTERVAL_S:
            self._sent_at = now
            self._send(ipc.Loading(phase=phase, done=done, total=total))


def return_freed_memory() -> None:
    """Give what loading has left over back to the system, and keep the rest out of the garbage collector's way."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m headrace.core", description=__doc__.splitlines()[0])
    parser.add_argument("parent_pid", type=int, help="process id of the server")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's business
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(asctime)s [core] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )  # fmt: skip
    server = MessageSocket(socket.socket(fileno=sys.stdin.fileno()))
    loop = CoreLoop(server)
    try:
        settings = read_settings(server)
        try:
            core = EngineCore(settings, ThrottledProgress(loop.send))
        except ConfigError as error:
            loop.send(ipc.Failed(message=str(error)))
            return 1
        except PeerGone:
            raise
        except Exception as error:
            logger.exception("The engine could not start.")
            loop.send(ipc.Failed(message=f"The engine could not start: {one_line(error)}"))
            return 1
        return_freed_memory()
        loop.send(ipc.Ready(info=core.info))
    except PeerGone:
        return 1
    loop.run(core)
    return 0


def read_settings(server: MessageSocket) -> EngineSettings:
    """The first message, when it has come. Raises PeerGone."""
    while (payload := server.receive()) is None:
        server.wait(None)
    return msgspec.msgpack.decode(payload, type=EngineSettings)


if __name__ == "__main__":
    sys.exit(main())
