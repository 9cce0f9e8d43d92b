"""`python -m headrace.bench.gateway`: what the gateway costs, next to a direct call and to the least its stack can do.

    upstream (20 ms) <- direct
    upstream (20 ms) <- floor    uvicorn + httptools + uvloop + aiohttp, passing bytes through (bench.gateway_floor)
    upstream (20 ms) <- ours     `headrace gateway`: key check, limits, routing and usage on

Rounds of all of them are interleaved and the medians of rounds are shown, so that a slow minute of the machine hits
everybody. Gateways have one core, upstream and generator another. Other gateways join with a command that starts them
and the headers that they want:

    --peer 'portkey=node node_modules/@portkey-ai/gateway/build/start-server.js --port={port}'
    --peer-header 'x-portkey-provider: openai' --peer-header 'x-portkey-custom-host: {upstream}/v1'
    --peer 'litellm=litellm --model openai/bench --alias bench --api_base {upstream}/v1 --port {port}'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop

from headrace.bench.gateway_load import Head, Round, run_round
from headrace.bench.servers import BenchError, Server, free_port, started

CONCURRENCY = 16


@dataclass
class Contestant:
    """Something that answers chat completions, and what its rounds measured."""

    name: str
    port: int
    head: Head
    server: Server | None
    """None for a direct call."""
    alone: list[Round] = field(default_factory=list)
    together: list[Round] = field(default_factory=list)
    streams: list[Round] = field(default_factory=list)
    rss_bytes: int = 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headrace.bench.gateway", description="What the gateway adds to a request.")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each measurement (%(default)s)")
    parser.add_argument("--requests-alone", type=int, default=150, help="requests a round, one at a time (%(default)s)")
    parser.add_argument("--requests", type=int, default=1600, help=f"requests a round, {CONCURRENCY} at a time")
    parser.add_argument("--streams", type=int, default=64, help=f"streams a round, {CONCURRENCY} at a time")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="another gateway to start")
    parser.add_argument("--peer-header", action="append", default=[], help="header of requests to peers, `name: value`")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser


@contextlib.contextmanager
def our_gateway(
    upstream_url: str, port: int, core: int | None, data_dir: Path | None = None
) -> Iterator[tuple[Server, str]]:
    """Our gateway, and a key with limits and a budget that are never reached. What it keeps, it keeps in `data_dir`,
    or in a new place."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "gateway.json"
        config.write_text(
            json.dumps(
                {
                    "providers": {"bench": {"base_url": upstream_url + "/v1", "api_key": "EMPTY", "models": ["bench"]}},
                    "routing": {"default": "bench"},
                }
            )
        )
        data = ["--data-dir", str(data_dir or Path(folder) / "data")]
        limits = ["--rpm", "100000000", "--tpm", "1000000000000", "--concurrency", "1000", "--budget", "1000000/total"]
        made = subprocess.run(
            [sys.executable, "-m", "headrace", "key", "create", "bench", *limits, *data],
            capture_output=True,
            text=True,
            check=False,
        )
        words = [word for word in made.stdout.split() if word.startswith("sk-")]
        if made.returncode or not words:
            raise BenchError(f"No key could be made:\n{made.stdout}{made.stderr}")
        command = [sys.executable, "-m", "headrace", "gateway", "--config", str(config), "--port", str(port), *data]
        with started(command, port, core=core, any_answer=True) as server:
            yield server, words[0]


def measure(contestants: Sequence[Contestant], arguments: argparse.Namespace) -> None:
    for number in range(arguments.rounds + 1):
        for contestant in contestants:
            results = []
            for streamed, requests, concurrency in (
                (False, arguments.requests_alone, 1),
                (False, arguments.requests, CONCURRENCY),
                (True, arguments.streams, CONCURRENCY),
            ):
                before = cpu_s(contestant.server)
                result = uvloop.run(run_round(contestant.port, contestant.head, streamed, requests, concurrency))
                result.cpu_s = cpu_s(contestant.server) - before
                results.append(result)
            if number:  # the first round warms up
                contestant.alone.append(results[0])
                contestant.together.append(results[1])
                contestant.streams.append(results[2])
            contestant.rss_bytes = sum(one.memory_info().rss for one in processes(contestant.server))
        print(f"\rround {number} of {arguments.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def processes(server: Server | None) -> list[psutil.Process]:
    return [] if server is None else server.processes()


def cpu_s(server: Server | None) -> float:
    """CPU seconds so far of all its processes; 0 for none."""
    times = [one.cpu_times() for one in processes(server)]
    return float(sum(each.user + each.system for each in times))


def figures(contestant: Contestant, direct: Contestant) -> dict[str, float]:
    """The table's rows; times in the units of their names, medians of rounds."""

    def added_ms(rounds: list[Round], base: list[Round], share: float) -> float:
        pairs = zip(rounds, base, strict=True)
        return 1000 * statistics.median(mine.latency_s(share) - theirs.latency_s(share) for mine, theirs in pairs)

    def first_chunk_ms() -> float:
        pairs = zip(contestant.streams, direct.streams, strict=True)
        return 1000 * statistics.median(mine.first_s(0.5) - theirs.first_s(0.5) for mine, theirs in pairs)

    pairs = list(zip(contestant.together, direct.together, strict=True))
    request_us = 1e6 * statistics.median(r.cpu_s / r.num_requests for r in contestant.together)
    chunk_us = statistics.median(
        (1e6 * r.cpu_s - request_us * r.num_requests) / max(1, r.num_chunks - r.num_requests)
        for r in contestant.streams
    )
    return {
        "added p50 ms, 1": added_ms(contestant.alone, direct.alone, 0.5),
        "added p99 ms, 1": added_ms(contestant.alone, direct.alone, 0.99),
        f"added p50 ms, {CONCURRENCY}": added_ms(contestant.together, direct.together, 0.5),
        f"added p99 ms, {CONCURRENCY}": added_ms(contestant.together, direct.together, 0.99),
        "throughput %": 100 * statistics.median(mine.rate / theirs.rate for mine, theirs in pairs),
        "added first chunk ms": first_chunk_ms(),
        "CPU us/request": request_us,
        "CPU us/chunk": chunk_us,
        "RSS MiB": contestant.rss_bytes / 2**20,
    }


def table(contestants: Sequence[Contestant], direct: Contestant, *, markdown: bool) -> str:
    columns = {c.name: figures(c, direct) for c in contestants}
    rows = [["", *columns, "ours/floor"]]
    for name, floor in columns["floor"].items():
        values = [column[name] for column in columns.values()]
        rows.append([name, *(f"{v:.2f}" for v in (*values, columns["ours"][name] / floor if floor else float("nan")))])
    if markdown:
        rows.insert(1, ["---", *["---:"] * (len(columns) + 1)])
        lines = ["| " + " | ".join(row) + " |" for row in rows]
    else:
        lines = [f"{row[0]:24}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows]
    rate = statistics.median(r.rate for r in direct.together)
    rounds = f"direct: {rate:.0f} requests/s at {CONCURRENCY}, medians of {len(direct.together)} rounds"
    return "\n".join([*lines, *([""] if markdown else []), rounds])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    gateway_core = cores[-1] if len(cores) > 1 else None
    if gateway_core is not None:
        os.sched_setaffinity(0, {cores[0]})
    python = sys.executable
    try:
        with contextlib.ExitStack() as stack:
            upstream_port, floor_port, our_port = free_port(), free_port(), free_port()
            url = f"http://127.0.0.1:{upstream_port}"
            command = [python, "-m", "headrace.bench.gateway_upstream", str(upstream_port)]
            stack.enter_context(started(command, upstream_port, core=cores[0], any_answer=True))
            command = [python, "-m", "headrace.bench.gateway_floor", url, str(floor_port)]
            floor = stack.enter_context(started(command, floor_port, core=gateway_core, any_answer=True))
            ours, key = stack.enter_context(our_gateway(url, our_port, gateway_core))
            direct = Contestant("direct", upstream_port, Head({}), None)
            contestants = [
                direct,
                Contestant("floor", floor_port, Head({}), floor),
                Contestant("ours", our_port, Head({"authorization": f"Bearer {key}"}), ours),
            ]
            headers = dict(line.split(": ", 1) for line in arguments.peer_header)
            for peer in arguments.peer:
                name, _, text = peer.partition("=")
                port = free_port()
                words = [word.format(port=port, upstream=url) for word in shlex.split(text)]
                process = stack.enter_context(started(words, port, core=gateway_core, any_answer=True))
                contestants.append(
                    Contestant(name, port, Head({k: v.format(upstream=url) for k, v in headers.items()}), process)
                )
            measure(contestants, arguments)
            if arguments.json:
                print(json.dumps({c.name: figures(c, direct) for c in contestants}, indent=1))
            else:
                print(table(contestants[1:], direct, markdown=arguments.markdown))
    except BenchError as error:
        print(f"headrace.bench.gateway: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
