"""`python -m headrace.bench.step`: what a decode step costs besides the model's forward.

    ... forward ] sample, take the tokens in | send them, look for messages | schedule, build the batch [ forward ...
                  step                       | loop                         | step

The core's own loop runs here, in this process, with the messages it would get from a server. Time is the thread's CPU
time from the end of one forward to the start of the next, so what the forward has thrown out of the caches is paid for;
other calls of the library are counted by themselves. A figure is the median of the steps.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.bench import arguments
from headrace.bench.kernels import TABLE_WIDTH
from headrace.config.errors import ConfigError
from headrace.config.resolve import resolve_model
from headrace.config.settings import EngineSettings
from headrace.core import CoreLoop, EngineCore, return_freed_memory
from headrace.kernels.native import library
from headrace.protocol import ipc
from headrace.protocol.message_socket import MessageSocket

SAMPLING = {
    "greedy": ipc.SamplingParams(max_tokens=1, temperature=0.0),
    "top_p": ipc.SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9),
    "penalties": ipc.SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, repetition_penalty=1.1),
}
FORWARDS, SAMPLE = ("hr_run", "hr_decode"), "hr_sample"
PROMPT_TOKENS = 4
UNSTEADY_STEPS = 4
"""At the start, left out: the prompt, and arrays that grow."""


@dataclass(frozen=True, slots=True)
class Figure:
    sampling: str
    rows: int
    step_us: float
    """Python between two forwards, in `EngineCore.step`."""
    loop_us: float
    """The same in the loop around it: messages."""
    library_us: float
    """In calls of the library besides the forward; none where one call does all of a step."""
    forward_us: float


class Clock:
    """Stands between Python and the library and notes the thread's CPU time around each call, from its making on."""

    def __init__(self) -> None:
        self.forwards: list[tuple[float, float]] = []
        """Start and end."""
        self.others: list[float] = []
        """Seconds of other calls between a forward and the next."""
        loaded, clock = library.load(), time.thread_time

        def forward(call: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(call)
            def timed(*arguments: Any) -> Any:
                start = clock()
                result = call(*arguments)
                self.forwards.append((start, clock()))
                self.others.append(0.0)
                return result

            return timed

        def other(call: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(call)
            def timed(*arguments: Any) -> Any:
                start = clock()
                result = call(*arguments)
                self.others[-1] += clock() - start
                return result

            return timed

        for name in FORWARDS:
            setattr(loaded, name, forward(getattr(loaded, name)))
        setattr(loaded, SAMPLE, other(getattr(loaded, SAMPLE)))

    def clear(self) -> None:
        self.forwards.clear()
        self.others.clear()


class _Core(EngineCore):
    """Notes when steps begin and end, and tells when it has nothing left to do."""

    when_done: Callable[[], object]
    ends: list[float]
    starts: list[float]

    def step(self) -> ipc.StepOutput | None:
        self.starts.append(time.thread_time())
        output = super().step()
        self.ends.append(time.thread_time())
        if output is not None and not output.stats.num_running:
            self.when_done()
        return output


READ_ON = "import os, select\nwhile select.select([0], [], []) and os.read(0, 1 << 16): pass"
"""As a server does: what nobody reads would hold up the loop in the end. A process of its own, as a thread would want
the interpreter's lock."""


def measure(core: _Core, clock: Clock, sampling: str, rows: int, steps: int) -> Figure:
    """Of `rows` requests that decode together for so many steps."""
    ours, theirs = socket.socketpair()
    server, client = MessageSocket(ours), MessageSocket(theirs)
    reader = subprocess.Popen([sys.executable, "-c", READ_ON], stdin=ours.fileno())
    try:
        for index in range(rows):
            params = msgspec.structs.replace(SAMPLING[sampling], max_tokens=steps + UNSTEADY_STEPS + 1, seed=index)
            token_ids = [1 + index, *range(2, PROMPT_TOKENS + 1)]
            server.send(
                ipc.encode(
                    ipc.AddRequest(request_id=f"request-{index}", token_ids=token_ids, params=params, arrival_s=0.0)
                )
            )
        core.when_done = lambda: server.send(ipc.encode(ipc.Stop()))
        clock.clear()
        core.starts, core.ends = [], []
        CoreLoop(client).run(core)
    finally:
        client.close()
        server.close()
        reader.wait()
    steady = range(len(clock.forwards) - steps, len(clock.forwards) - 1)
    between = [clock.forwards[i + 1][0] - clock.forwards[i][1] for i in steady]
    loop = [core.starts[i + 1] - core.ends[i] for i in steady]
    other = [clock.others[i] for i in steady]
    return Figure(
        sampling,
        rows,
        step_us=1e6 * median(whole - part - rest for whole, part, rest in zip(between, loop, other, strict=True)),
        loop_us=1e6 * median(loop),
        library_us=1e6 * median(other),
        forward_us=1e6 * median(end - start for start, end in (clock.forwards[i] for i in steady)),
    )


def table(figures: Sequence[Figure]) -> Table:
    shown = Table("sampling", "rows", "step us", "loop us", "library us", "forward us", "Python's share")
    for column in shown.columns[1:]:
        column.justify = "right"
    for f in figures:
        times = (f.step_us, f.loop_us, f.library_us, f.forward_us)
        share = (f.step_us + f.loop_us) / sum(times)
        shown.add_row(f.sampling, str(f.rows), *(f"{us:.0f}" for us in times), f"{share:.2%}")
    return shown


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headrace.bench.step", description="A decode step besides its forward.")
    parser.add_argument("--model", help="a path (the bundled model)")
    parser.add_argument("--sampling", default="greedy,top_p", help=f"of {', '.join(SAMPLING)} (%(default)s)")
    parser.add_argument("--rows", type=arguments.counts, default="1,32", help="with commas (%(default)s)")
    parser.add_argument("--steps", type=arguments.count, default=60, help="measured for each figure (%(default)s)")
    parser.add_argument("--json", type=arguments.new_file, help="write the figures to this file")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    kinds = args.sampling.split(",")
    unknown = [kind for kind in kinds if kind not in SAMPLING]
    if unknown:
        parser().error(f"--sampling {unknown[0]}: there are {', '.join(SAMPLING)}")
    if args.steps < 2:
        parser().error(f"--steps {args.steps}: two at least")
    rows: list[int] = args.rows
    clock = Clock()
    # One thread: what workers spend would not be this thread's time.
    try:
        settings = EngineSettings(
            model=str(resolve_model(args.model)), kernels="native", threads=1, max_num_seqs=max(rows),
            max_model_len=PROMPT_TOKENS + args.steps + UNSTEADY_STEPS + 1, kv_cache_memory_bytes=1 << 28,
        )  # fmt: skip
        core = _Core(settings)
    except ConfigError as error:
        parser().error(str(error))
    return_freed_memory()
    figures = [measure(core, clock, kind, count, args.steps) for kind in kinds for count in rows]
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    console.print(table(figures))
    if args.json:
        args.json.write_text(json.dumps({"steps": [asdict(figure) for figure in figures]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
