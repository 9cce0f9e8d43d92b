"""Hours in minutes: thousands of requests, many cut short, and the memory of both processes stays flat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.api.test_load import run_load, wait_until_idle
from tests.serving import MODEL_NAME, Server, running_server

pytestmark = pytest.mark.timeout(3600)

ROUNDS = 4
REQUESTS_A_ROUND = 500
GROWTH_LIMIT_MB = 25


def pss_mb(server: Server) -> float:
    """Proportional set size of all processes, MB of 10**6 bytes."""
    return sum(p.memory_full_info().pss for p in [server.process, *server.children()]) / 1e6


def touch_the_whole_pool(server: Server) -> None:
    """The KV cache is mapped and not touched: every page of it counts from its first use on, which is no leak."""
    for length in (3800, 2000):
        prompt = [(7 * i * i + length) % 40_000 + 1000 for i in range(length)]
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1}
        answer = httpx.post(server.base_url + "/completions", json=body, timeout=600)
        assert answer.status_code == 200, answer.text


def test_memory_is_flat_over_2000_requests_after_the_first_500(tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))
    with running_server(tmp_path / "server.log", flags) as server:
        touch_the_whole_pool(server)
        asyncio.run(run_load(server.base_url, requests=500, concurrency=64, leavers=30, seed=1))
        wait_until_idle(server.base_url)
        sizes = [pss_mb(server)]
        for i in range(ROUNDS):
            asyncio.run(run_load(server.base_url, requests=REQUESTS_A_ROUND, concurrency=64, leavers=30, seed=2 + i))
            wait_until_idle(server.base_url)
            sizes.append(pss_mb(server))
            print(f"after {500 + (i + 1) * REQUESTS_A_ROUND} requests: {sizes[-1]:.0f} MB", flush=True)
        print("PSS in MB after each 500 requests:", [round(size) for size in sizes])
        assert sizes[-1] - sizes[0] < GROWTH_LIMIT_MB, sizes
