"""`python -m headrace.bench.compare`: Headrace beside its peers under the same loads, interleaved.

    python -m headrace.bench.compare --models models/ --workloads W1,W2 --rounds 3 --json now.json
    python -m headrace.bench.compare --base before.json --json now.json

Every server is up and idle while another is measured; each round goes through all of them, so that what else the
machine does hits everybody. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import platform
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.bench.arguments import can_be_written
from headrace.bench.contestants import Contestant, contestants, running
from headrace.bench.load import Target
from headrace.bench.servers import BenchError, Server
from headrace.bench.workloads import HEADLINE, REQUESTS, WORKLOADS, Figures, run_workload


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headrace.bench.compare", description="Compare servers under the same loads.")
    parser.add_argument("--models", type=Path, help="folder with hf/ and *.gguf (models, if there is one)")
    parser.add_argument("--workloads", default="W1,W2,W3,W4", help="which loads, with commas (%(default)s)")
    parser.add_argument("--only", default="", help="servers whose name has one of these words, with commas")
    parser.add_argument("--rounds", type=int, default=3, help="how often each load runs on each server (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of every server (%(default)s)")
    parser.add_argument("--vllm", help="the program vllm, when it is not on PATH")
    parser.add_argument("--llama-cpp", help="folder of llama-server and llama-bench, when they are not on PATH")
    parser.add_argument("--json", type=Path, help="write every figure to this file, as soon as it is measured")
    parser.add_argument("--base", type=Path, help="an earlier --json file: show what changed since")
    return parser


def measure(
    chosen: Sequence[Contestant], workloads: Sequence[str], rounds: int, console: Console
) -> Generator[dict[str, Any], None, None]:
    """One entry for each server, load and round, and one for each server's start and memory, as they are measured.

    A server that does not start or has ended is named and left out; what was measured of it before stays."""

    def entry(contestant: Contestant, load: str, number: int, figures: Figures) -> dict[str, Any]:
        known = {name: value for name, value in figures.items() if not math.isnan(value)}
        shown = ", ".join(f"{name} {value:.4g}" for name, value in known.items())
        console.print(f"{contestant.name:<16} {load} round {number + 1}: {shown or 'failed'}", highlight=False)
        server = {"server": contestant.name, "scheme": contestant.scheme}
        return {**server, "load": load, "round": number, "figures": known}

    with contextlib.ExitStack() as stack:
        up: list[tuple[Contestant, Server]] = []
        for contestant in chosen:
            if not contestant.is_server:
                continue
            try:
                server = stack.enter_context(running(contestant))
            except BenchError as error:
                console.print(str(error), style="red", highlight=False, markup=False)
                continue
            yield entry(contestant, "start", 0, {"start s": server.start_s, "idle PSS MiB": _pss_mib(server)})
            up.append((contestant, server))
            run_workload("W1", Target(server.url, contestant.model), seed=1)  # whatever is done once is done now
        for number in range(rounds):
            for contestant, _ in up:
                if contestant.bench:
                    yield entry(contestant, "bench", number, {"decode tok/s a stream": bench_rate(contestant.bench)})
            for load in workloads:
                seed = 1000 * number + 7
                for contestant, server in list(up):
                    yield entry(contestant, load, number, served_figures(contestant, server, load, seed))
                    if server.exit_status is not None:
                        said = f"{contestant.name} has ended with {server.exit_status} and is left out from here on"
                        console.print(said, style="red", highlight=False, markup=False)
                        up.remove((contestant, server))
                for contestant in chosen:
                    if not contestant.is_server and load in REQUESTS:
                        yield entry(contestant, load, number, offline_figures(contestant, load, seed))


def served_figures(contestant: Contestant, server: Server, load: str, seed: int) -> Figures:
    """The load's figures, and the memory of all the server's processes near its end, while it runs."""
    memory: list[float] = []
    target = Target(server.url, contestant.model)
    figures = run_workload(load, target, seed, lambda: memory.append(_pss_mib(server)))
    return {**figures, "PSS MiB": max(memory, default=math.nan)}


def _pss_mib(server: Server) -> float:
    """nan for one that has ended."""
    return server.pss_bytes() / (1 << 20) or math.nan


def offline_figures(contestant: Contestant, load: str, seed: int) -> Figures:
    """What a contestant without a server printed; errors 1 when it failed."""
    command = [part.replace("{load}", load).replace("{seed}", str(seed)) for part in contestant.command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return {name: float(value) for name, value in json.loads(done.stdout).items()}
    except (ValueError, TypeError, AttributeError):
        return {"errors": 1}


def bench_rate(command: Sequence[str]) -> float:
    """Tokens a second of llama-bench's generation test; nan when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return float(json.loads(done.stdout)[0]["avg_ts"])
    except (ValueError, LookupError, TypeError):
        return math.nan


def medians(entries: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str], Figures]:
    """(scheme, server, load) to the figures' medians, without the NaN that older files have for a round that failed."""
    gathered: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for entry in entries:
        place = gathered.setdefault((entry["scheme"], entry["server"], entry["load"]), {})
        for name, value in entry["figures"].items():
            if not math.isnan(value):
                place.setdefault(name, []).append(value)
    return {key: {name: statistics.median(v) for name, v in figures.items()} for key, figures in gathered.items()}


def tables(entries: Sequence[dict[str, Any]]) -> list[Table]:
    """One table a load and scheme; `ours` is how many times better Headrace's best of the scheme is in the headline."""
    found = medians(entries)
    result = []
    for load in dict.fromkeys(load for _, _, load in found):
        for scheme in dict.fromkeys(scheme for scheme, _, at in found if at == load):
            rows = {server: figures for (s, server, at), figures in found.items() if (s, at) == (scheme, load)}
            columns = list(dict.fromkeys(name for figures in rows.values() for name in figures))
            if not columns:
                continue
            table = Table(title=f"{load}, {scheme}", title_justify="left")
            table.add_column("server")
            for column in columns:
                table.add_column(column, justify="right")
            headline = HEADLINE.get(load, columns[0])
            table.add_column(f"Headrace is better by ({headline})", justify="right")
            ours = _best((f.get(headline, math.nan) for n, f in rows.items() if n.startswith("headrace")), headline)
            for server, figures in rows.items():
                value = figures.get(headline, math.nan)
                more, less = (value, ours) if _lower_is_better(headline) else (ours, value)
                ratio = more / less if less else math.nan
                shown = "" if server.startswith("headrace") or math.isnan(ratio) else f"{ratio:.2f} x"
                table.add_row(server, *(f"{figures.get(column, math.nan):.4g}" for column in columns), shown)
            result.append(table)
    return result


def changes(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> Table:
    """What Headrace's figures were in an earlier run and are in this one."""
    old, new = medians(before), medians(now)
    table = Table(title="Since the base", title_justify="left")
    for column in ("server", "load", "figure", "before", "now", "now / before"):
        table.add_column(column, justify="left" if column in ("server", "load", "figure") else "right")
    for key in new:
        for name, value in new[key].items():
            earlier = old.get(key, {}).get(name)
            if key[1].startswith("headrace") and earlier is not None and name != "errors":
                ratio = f"{value / earlier:.2f}" if earlier else ""
                table.add_row(key[1], key[2], name, f"{earlier:.4g}", f"{value:.4g}", ratio)
    return table


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return {"cpu": name, "system": platform.platform(), "python": platform.python_version()}


def _best(values: Iterable[float], figure: str) -> float:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    return min(known) if _lower_is_better(figure) else max(known)


def _lower_is_better(figure: str) -> bool:
    return figure.endswith((" ms", " s", " MiB"))


def _earlier(file: Path) -> list[dict[str, Any]]:
    """The entries that a --json of this program wrote. Raises BenchError if that is something else."""
    try:
        entries = json.loads(file.read_text())["entries"]
        medians(entries)
    except OSError as error:
        raise BenchError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BenchError(f"{file} was not written by --json of this program") from None
    return list(entries)


def _checked(args: argparse.Namespace) -> list[str]:
    """The loads. Raises BenchError for what would show only after the measuring, or would measure something else."""
    loads = [load for load in args.workloads.split(",") if load]
    unknown = [load for load in loads if load not in WORKLOADS]
    if unknown or not loads:
        raise BenchError(f"--workloads {args.workloads!r}: there are {', '.join(WORKLOADS)}")
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            raise BenchError(f"--{name} {getattr(args, name)}: it must be at least 1")
    if args.models is not None and not args.models.is_dir():
        raise BenchError(f"--models {args.models}: there is no such folder")
    if args.llama_cpp and shutil.which("llama-server", path=args.llama_cpp) is None:
        raise BenchError(f"--llama-cpp {args.llama_cpp}: there is no llama-server in it")
    if args.vllm and shutil.which(args.vllm) is None:
        raise BenchError(f"--vllm {args.vllm}: there is no such program")
    if args.json is not None and not can_be_written(args.json):
        raise BenchError(f"--json {args.json}: no file can be written there")
    return loads


def _chosen(found: Sequence[Contestant], missing: Sequence[str], only: str, console: Console) -> list[Contestant]:
    """Those whose name has one of the words of `only`, and a line for each of these that is left out. Raises BenchError
    for a word that no name has, and when nothing is left."""
    words = [word for word in only.split(",") if word]
    for word in words:
        if not any(word in name for name in (*(c.name for c in found), *(line.partition(":")[0] for line in missing))):
            raise BenchError(f"--only {word}: no server's name has that; there are {', '.join(c.name for c in found)}")
    for line in missing:
        if not words or any(word in line.partition(":")[0] for word in words):
            console.print(f"left out: {line}", highlight=False, markup=False)
    chosen = [c for c in found if not words or any(word in c.name for word in words)]
    if not chosen:
        raise BenchError("there is nothing to compare")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console(width=200 if not sys.stdout.isatty() else None)
    try:
        loads = _checked(args)
        base = None if args.base is None else _earlier(args.base)
        found, missing = contestants(args.models or Path("models"), args.threads, loads, args.vllm, args.llama_cpp)
        chosen = _chosen(found, missing, args.only, console)
    except BenchError as error:
        parser().error(str(error))
    commands = {c.name: " ".join(c.command) for c in chosen}
    head = {"date": datetime.date.today().isoformat(), "machine": machine(), "commands": commands}
    entries: list[dict[str, Any]] = []
    status = 0
    try:
        with contextlib.closing(measure(chosen, loads, args.rounds, console)) as measured:
            for entry in measured:
                entries.append(entry)
                if args.json is not None:
                    unfinished = args.json.with_name(args.json.name + ".new")
                    unfinished.write_text(json.dumps({**head, "entries": entries}, indent=1) + "\n")
                    unfinished.replace(args.json)
    except KeyboardInterrupt:
        console.print("interrupted: what was measured until now", style="red")
        status = 130
    for table in tables(entries):
        console.print(table)
    if base is not None:
        console.print(changes(base, entries))
    return status


if __name__ == "__main__":
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)  # the servers end with it, in a shell's background too
    sys.exit(main())
