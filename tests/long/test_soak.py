"""Days in minutes: every kind of request, many cut short, a KV cache that is always too small, and nothing piles up.

In ten rounds, after each of which the server must come to rest: no request, no block held, the same tokens for the same
question, and the memory, descriptors and threads that it had halfway, when threads, buffers and caches had been made.

    make test-long ARGS="-k soak --soak-minutes 5"
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx
import psutil
import pytest

from tests.api.test_load import metric, wait_until_idle
from tests.long.soak import Client, Tally
from tests.serving import Server, running_server
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.timeout(6000)

ROUNDS = 10
WARM_UP_ROUNDS = 5
NUM_CLIENTS = 24
KV_CACHE_BYTES = 1152 * 512
"""1,152 tokens of the tiny model in float32, for clients that want up to 1,000 each: somebody is always preempted."""
SWAP_SPACE_GIB = 0.004
FLAGS = (
    "--dtype", "float32", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--swap-space", str(SWAP_SPACE_GIB),
    "--max-num-queued-reqs", "16",
)  # fmt: skip
LONGEST_PROMPT_WORDS = 600
GROWTH_LIMIT_MB = 20


@dataclass(frozen=True)
class Rest:
    """The server between two rounds. `pss_mb`: proportional set size of all its processes, MB of 10**6 bytes."""

    requests: int
    pss_mb: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, server: Server, requests: int) -> Rest:
        processes: list[psutil.Process] = [server.process, *server.children()]
        return cls(
            requests,
            sum(p.memory_full_info().pss for p in processes) / 1e6,
            sum(p.num_fds() for p in processes),
            sum(p.num_threads() for p in processes),
        )


def canary(server: Server) -> str:
    body = {"prompt": "The wheel of the mill", "max_tokens": 24, "temperature": 0}
    return str(httpx.post(server.base_url + "/completions", json=body, timeout=120).json()["choices"][0]["text"])


async def start_all_threads(server: Server) -> None:
    """The server's pool for long texts grows by need, and a thread has a heap of its own, which is no leak."""
    async with aiohttp.ClientSession() as session:

        async def long_text() -> None:
            async with session.post(server.url + "/v1/completions", json={"prompt": "word " * 20_000}) as answer:
                assert answer.status == 400

        await asyncio.gather(*(long_text() for _ in range(24)))


async def one_round(server: Server, seconds: float, tally: Tally, seed: int) -> None:
    end = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [
            Client(server.url, session, tally, random.Random(1000 * seed + i), LONGEST_PROMPT_WORDS)
            for i in range(NUM_CLIENTS)
        ]
        await asyncio.gather(*(client.work(lambda: time.monotonic() > end) for client in clients))


def test_nothing_piles_up(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    minutes = pytestconfig.getoption("--soak-minutes")
    tally = Tally()
    rests: list[Rest] = []
    # What is kept for a request does not depend on the model's size; a tiny one serves many more of them.
    model = tiny_llama(tmp_path / "model", bundled_tokenizer=True, max_positions=1024)
    with running_server(tmp_path / "server.log", ("--model", str(model), *FLAGS)) as server:
        expected = canary(server)
        asyncio.run(start_all_threads(server))
        for number in range(ROUNDS):
            asyncio.run(one_round(server, 60 * minutes / ROUNDS, tally, number))
            wait_until_idle(server.base_url)
            assert metric(server.base_url, "vllm:kv_cache_usage_perc") == 0
            assert canary(server) == expected, f"round {number}: other tokens"
            rests.append(Rest.of(server, tally.outcomes.total()))
            print(f"round {number + 1}: {rests[-1]}", flush=True)
        preemptions = metric(server.base_url, "vllm:num_preemptions_total")
        restarts = metric(server.base_url, "headrace:engine_restarts_total")
        swapped = [metric(server.base_url, f"headrace:host_blocks_{way}_total") for way in ("saved", "loaded")]
    first, last = rests[WARM_UP_ROUNDS - 1], rests[-1]
    print(f"\nSoak of {minutes:g} minutes, {NUM_CLIENTS} clients, {tally.tokens:,} generated tokens counted")
    for outcome, count in sorted(tally.outcomes.items()):
        print(f"  {outcome:<14} {count:>8,}")
    print(f"  blocks to the swap space {swapped[0]:,.0f}, back {swapped[1]:,.0f}")
    print(f"  preemptions    {preemptions:>8,.0f}\n  core restarts  {restarts:>8,.0f}")
    print(f"  PSS {first.pss_mb:.0f} -> {last.pss_mb:.0f} MB, highest {max(rest.pss_mb for rest in rests):.0f}")
    print(f"  descriptors {first.descriptors} -> {last.descriptors}, threads {first.threads} -> {last.threads}")
    assert tally.outcomes["wrong"] == 0, "\n".join(tally.wrong)
    assert restarts == 0
    assert preemptions > 0 and min(swapped) > 0
    assert last.pss_mb - first.pss_mb < GROWTH_LIMIT_MB, rests
    assert last.descriptors <= first.descriptors + 2, rests
    assert last.threads <= first.threads, rests
