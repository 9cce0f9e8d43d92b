"""The four loads that servers are compared under, and what is read off each.

    W1  one stream            8 requests of 128 tokens in, 128 out
    W2  32 streams            128 requests of 128 in, 128 out, no prefix shared
    W3  16 streams            64 requests of one shared 1,024-token prefix and 32 own tokens in, 64 out
    W4  8 streams, 64 in and 512 out, when a prompt of 6,000 tokens arrives

Prompts are new in every round and the same for every server in it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from itertools import pairwise

import aiohttp

from headrace.bench.load import WORDS, Outcome, Request, Target, random_requests, run_load, send
from headrace.bench.report import percentile

Figures = dict[str, float]
"""Name with its unit to value; nan where nothing was measured."""

UNLIMITED = float("inf")


def one_by_one(seed: int) -> tuple[list[Request], int]:
    return random_requests(8, 128, 128, seed=seed), 1


def distinct(seed: int) -> tuple[list[Request], int]:
    return random_requests(128, 128, 128, seed=seed), 32


def one_prefix(seed: int) -> tuple[list[Request], int]:
    rng = random.Random(seed)
    prefix = " ".join(rng.choices(WORDS, k=1024))
    return [Request(f"{prefix} {' '.join(rng.choices(WORDS, k=32))}", 64) for _ in range(64)], 16


REQUESTS: dict[str, Callable[[int], tuple[list[Request], int]]] = {"W1": one_by_one, "W2": distinct, "W3": one_prefix}
"""The loads that are lists of requests: seed to the requests and how many streams there are at a time."""


async def long_prompt(target: Target, seed: int, last_sent: Callable[[], object]) -> Figures:
    """The streams' worst gap while the long prompt is computed, and its time to first token then and alone.

    `last_sent` is called, in a thread, when the long prompt has been answered and the streams are still under way."""
    rng = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        alone = await send(session, target, Request(" ".join(rng.choices(WORDS, k=6000)), 2))
        arrivals: list[list[float]] = [[] for _ in range(8)]
        streams = [
            asyncio.create_task(send(session, target, request, arrived=times.append))
            for request, times in zip(random_requests(8, 64, 512, seed=seed + 1), arrivals, strict=True)
        ]
        while min(map(len, arrivals)) < 16 and not any(stream.done() for stream in streams):
            await asyncio.sleep(0.02)
        long = await send(session, target, Request(" ".join(rng.choices(WORDS, k=6000)), 2))
        await asyncio.to_thread(last_sent)
        outcomes = [*await asyncio.gather(*streams), alone, long]
    errors = sum(outcome.error is not None for outcome in outcomes)
    if not long.token_s or not alone.token_s:
        return {"errors": errors}
    first = long.token_s[0]
    gaps = [b - a for times in arrivals for a, b in pairwise(times) if b >= long.start_s and a <= first]
    return {
        "worst gap ms": 1e3 * max(gaps, default=math.nan),
        "long TTFT s": first - long.start_s,
        "long TTFT alone s": alone.token_s[0] - alone.start_s,
        "errors": errors,
    }


WORKLOADS = (*REQUESTS, "W4")

HEADLINE = {"W1": "output tok/s", "W2": "output tok/s", "W3": "output tok/s", "W4": "worst gap ms"}


def run_workload(name: str, target: Target, seed: int, last_sent: Callable[[], object] = lambda: None) -> Figures:
    """What was read off it. `last_sent` is called once, in a thread, near the load's end and while it still runs."""
    if name == "W4":
        return asyncio.run(long_prompt(target, seed, last_sent))
    requests, streams = REQUESTS[name](seed)
    load = run_load(target, requests, max_concurrency=streams, request_rate=UNLIMITED, last_sent=last_sent)
    return _served(asyncio.run(load))


def _served(outcomes: list[Outcome]) -> Figures:
    """Throughput over the whole, from the first start to the last end; rates and times of the served requests."""
    served = [outcome for outcome in outcomes if outcome.error is None and outcome.token_s]
    errors = len(outcomes) - len(served)
    if not served:
        return {"errors": errors}
    seconds = max(outcome.end_s for outcome in outcomes) - min(outcome.start_s for outcome in outcomes)
    ttft = sorted(outcome.token_s[0] - outcome.start_s for outcome in served)
    itl = sorted(b - a for outcome in served for a, b in pairwise(outcome.token_s)) or [math.nan]
    return {
        "output tok/s": sum(outcome.completion_tokens for outcome in served) / seconds,
        "decode tok/s a stream": 1 / percentile(itl, 50),
        "TTFT p50 ms": 1e3 * percentile(ttft, 50),
        "TTFT p95 ms": 1e3 * percentile(ttft, 95),
        "ITL p50 ms": 1e3 * percentile(itl, 50),
        "ITL p99 ms": 1e3 * percentile(itl, 99),
        "errors": errors,
    }
