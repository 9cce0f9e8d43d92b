"""Many clients at once through the OpenAI SDK, some of which leave early: nobody is hurt and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import openai
import pytest

MODEL = "smollm2-135m-instruct"
WORDS = "river wheel stone water power turns the mill grain flour bread morning light engine block table queue".split()


def metric(base_url: str, name: str) -> float:
    """The sum over labels of one metric of the running server."""
    text = httpx.get(base_url.removesuffix("/v1") + "/metrics", timeout=10).text
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    assert values, f"{name} is not exported"
    return sum(values)


async def one_request(client: openai.AsyncOpenAI, rng: random.Random, leave_after: int | None) -> str:
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(3, 24)))
    max_tokens = rng.randint(2, 12)
    stream = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=200 if leave_after else max_tokens,
        temperature=rng.choice([0.0, 0.8]),
        seed=rng.randint(0, 1000),
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = 0
    usage = None
    finish = None
    async for chunk in stream:
        chunks += 1
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].finish_reason:
            finish = chunk.choices[0].finish_reason
        if leave_after and chunks >= leave_after:
            await stream.close()
            return "left"
    assert finish == "length"
    assert usage is not None and usage.completion_tokens == max_tokens
    return "done"


async def run_load(base_url: str, *, requests: int, concurrency: int, leavers: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    leaving = set(rng.sample(range(requests), leavers))
    gate = asyncio.Semaphore(concurrency)
    counts: dict[str, int] = {}
    http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=300)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="any", http_client=http, max_retries=0) as client:

        async def guarded(i: int) -> None:
            async with gate:
                leave_after = rng.randint(1, 4) if i in leaving else None
                outcome = await one_request(client, random.Random(seed * 100_003 + i), leave_after)
                counts[outcome] = counts.get(outcome, 0) + 1

        async with asyncio.TaskGroup() as group:
            for i in range(requests):
                group.create_task(guarded(i))
    return counts


def wait_until_idle(base_url: str, within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while True:
        state = {n: metric(base_url, n) for n in ("vllm:num_requests_running", "vllm:num_requests_waiting")}
        used = metric(base_url, "vllm:kv_cache_usage_perc")
        if not any(state.values()) and used == 0:
            return
        assert time.monotonic() < deadline, f"still busy {within_s} s after the last request: {state}, KV use {used}"
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_64_streams_500_requests_30_of_them_leaving_early(server) -> None:
    counts = asyncio.run(run_load(server.base_url, requests=500, concurrency=64, leavers=30, seed=7))
    assert counts == {"done": 470, "left": 30}
    wait_until_idle(server.base_url)
