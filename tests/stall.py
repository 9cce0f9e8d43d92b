"""Measure how long running streams wait while a long prompt arrives."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass

import aiohttp

from tests.serving import MODEL_NAME


@dataclass(frozen=True)
class Stall:
    worst_gap_s: float
    usual_gap_s: float
    ttft_s: float
    """Of the long prompt."""
    gaps_during_prefill: int

    def __str__(self) -> str:
        return (
            f"worst gap {1000 * self.worst_gap_s:.0f} ms, median gap {1000 * self.usual_gap_s:.0f} ms, "
            f"time to first token of the long prompt {self.ttft_s:.1f} s, {self.gaps_during_prefill} tokens meanwhile"
        )


async def _stream(session: aiohttp.ClientSession, base_url: str, body: dict, arrivals: list[float]) -> None:
    async with session.post(base_url + "/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                data = json.loads(line[6:])
                assert "error" not in data, data
                if data["choices"] and data["choices"][0].get("text"):
                    arrivals.append(time.perf_counter())


async def _measure(base_url: str, prompt_tokens: int, streams: int) -> Stall:
    timeout = aiohttp.ClientTimeout(total=None)
    common = {"model": MODEL_NAME, "stream": True, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession(timeout=timeout) as session:
        # Whole words only: a token that is part of a character has no chunk of its own, which would look like a gap.
        root = base_url.removesuffix("/v1")
        async with session.post(root + "/tokenize", json={"prompt": " the river turns a wheel of stone"}) as response:
            common["allowed_token_ids"] = (await response.json())["tokens"]
        short: list[list[float]] = [[] for _ in range(streams)]
        tasks = [
            asyncio.create_task(
                _stream(
                    session, base_url, common | {"prompt": [1000 + i] * 32 + [200 + i], "max_tokens": 1500}, short[i]
                )
            )
            for i in range(streams)
        ]
        while min(len(s) for s in short) < 12:
            await asyncio.sleep(0.05)
        long_arrivals: list[float] = []
        prompt = [(7 * i * i + 13 * i) % 40_000 + 1000 for i in range(prompt_tokens)]
        sent = time.perf_counter()
        await _stream(session, base_url, common | {"prompt": prompt, "max_tokens": 2}, long_arrivals)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    first = long_arrivals[0]
    gaps = [b - a for s in short for a, b in itertools.pairwise(s) if sent <= b and a <= first]
    assert len(gaps) >= streams, "the streams did not run while the prompt was computed"
    return Stall(max(gaps), sorted(gaps)[len(gaps) // 2], first - sent, len(gaps))


def measure(base_url: str, *, prompt_tokens: int, streams: int = 8) -> Stall:
    """`streams` decode; then a prompt of `prompt_tokens` distinct tokens arrives. Gaps are between text chunks."""
    return asyncio.run(_measure(base_url, prompt_tokens, streams))
