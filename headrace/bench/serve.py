"""`python -m headrace.bench.serve`: load on a running server, or on one it starts, and the report.

    python -m headrace.bench.serve --base-url http://127.0.0.1:8000 --num-prompts 64 --max-concurrency 16
    python -m headrace.bench.serve --start-server --num-prompts 64 -- --dtype float32

Flags have vLLM's names. What follows `--` are flags of `headrace serve` for the server it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import aiohttp

from headrace.bench.load import Target, random_requests, run_load
from headrace.bench.report import summarise
from headrace.bench.servers import BenchError, free_port, started


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headrace.bench.serve", description="Measure a server from outside.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server's root (%(default)s)")
    parser.add_argument("--start-server", action="store_true", help="start `headrace serve` with the flags after --")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--model", help="name to ask for; the server's first when left out")
    parser.add_argument("--num-prompts", type=int, default=32, help="requests to send (%(default)s)")
    parser.add_argument("--random-input-len", type=int, default=128, help="tokens of a prompt, about (%(default)s)")
    parser.add_argument("--random-output-len", type=int, default=32, help="tokens to generate (%(default)s)")
    parser.add_argument("--random-range-ratio", type=float, default=0.0, help="vary both by this share (%(default)s)")
    parser.add_argument("--max-concurrency", type=int, default=8, help="requests in hand at once (%(default)s)")
    parser.add_argument("--request-rate", type=float, default=float("inf"), help="requests a second; inf = no wait")
    parser.add_argument("--num-warmups", type=int, default=2, help="requests sent first and not counted (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (%(default)s)")
    return parser


async def first_model(url: str, headers: dict[str, str]) -> str:
    try:
        async with aiohttp.ClientSession(headers=headers) as session, session.get(url + "/v1/models") as response:
            if response.status != 200:
                raise BenchError(f"{url}/v1/models gives {response.status}: {(await response.text())[:400]}")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError) as problem:
        raise BenchError(f"no server at {url}: {problem}") from problem


async def measure(url: str, args: argparse.Namespace) -> str:
    """Warm up, send the load, and the report as text. Raises BenchError when not one request was served."""
    keyed = Target(url, args.model or "", args.api_key)
    target = Target(url, args.model or await first_model(url, keyed.headers), args.api_key)
    warmups = random_requests(args.num_warmups, args.random_input_len, 4, seed=args.seed + 1)
    await run_load(target, warmups, max_concurrency=1, request_rate=float("inf"))
    requests = random_requests(
        args.num_prompts,
        args.random_input_len,
        args.random_output_len,
        range_ratio=args.random_range_ratio,
        seed=args.seed,
    )
    outcomes = await run_load(
        target, requests, max_concurrency=args.max_concurrency, request_rate=args.request_rate, seed=args.seed
    )
    report = summarise(outcomes, max_concurrency=args.max_concurrency, request_rate=args.request_rate)
    failures = [o.error for o in outcomes if o.error is not None]
    if not report.completed:
        raise BenchError(f"none of {len(outcomes)} requests was served; the first failed with: {failures[0]}")
    first_failure = f"First failure: {failures[0]}\n" if failures else ""
    return first_failure + report.render()


def main(argv: Sequence[str] | None = None) -> int:
    own = list(sys.argv[1:] if argv is None else argv)
    server_flags: list[str] = []
    if "--" in own:
        place = own.index("--")
        own, server_flags = own[:place], own[place + 1 :]
    args = parser().parse_args(own)
    if server_flags and not args.start_server:
        parser().error("flags after -- are for the server that --start-server starts")
    try:
        if args.start_server:
            port = free_port()
            command = [sys.executable, "-m", "headrace", "serve", "--host", "127.0.0.1", "--port", str(port)]
            with started([*command, *server_flags], port) as server:
                print(asyncio.run(measure(server.url, args)))
        else:
            print(asyncio.run(measure(args.base_url.rstrip("/").removesuffix("/v1"), args)))
    except BenchError as problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
