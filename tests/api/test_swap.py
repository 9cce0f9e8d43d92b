"""A server whose KV cache holds one request, with swap space behind it and a queue bounded in tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.serving import Server, running_server
from tests.tiny_models import tiny_llama

FLAGS = (
    "--dtype float32 --block-size 8 --max-model-len 120 --kv-cache-memory-bytes 64K --swap-space 0.01 --max-num-seqs 2 "
    "--max-num-queued-tokens 150"
).split()
"""512 bytes a token: 128 tokens of KV cache, and 20,000 in host memory. The model computes so much for a token that it
is worth fetching one."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("swap")
    with running_server(folder / "log", ["--model", str(tiny_llama(folder, ffn=8192)), *FLAGS]) as server:
        yield server


def complete(server: Server, prompt: list[int], max_tokens: int = 20) -> tuple[str, int]:
    """The text, and how many of the prompt's tokens were found."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.base_url}/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["text"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def metric(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def test_prefixes_that_no_longer_fit_come_back_from_host_memory(server: Server) -> None:
    prompts = [[10 + i, *range(20, 100)] for i in range(4)]
    first = [complete(server, prompt) for prompt in prompts]
    again = [complete(server, prompt) for prompt in prompts]
    assert [text for text, _ in again] == [text for text, _ in first]
    assert [found for _, found in first] == [0] * 4
    assert [found for _, found in again] == [80] * 4
    assert metric(server, "vllm:external_prefix_cache_hits_total") >= 200
    assert 0 < metric(server, "vllm:cpu_cache_usage_perc") < 0.1
    assert metric(server, "headrace:host_blocks_loaded_total") >= 25
    assert 'num_cpu_blocks="2621"' in httpx.get(f"{server.url}/metrics", timeout=60).text


def test_resetting_the_prefix_cache_forgets_both_places(server: Server) -> None:
    prompt = [9, *range(20, 100)]
    complete(server, prompt)
    complete(server, [8, *range(20, 100)])
    answer = httpx.post(f"{server.url}/reset_prefix_cache", timeout=60)
    assert answer.status_code == 200
    assert answer.json()["num_blocks"] > 16, "more than the KV cache has"
    assert complete(server, prompt)[1] == 0


async def test_requests_that_take_turns_in_the_cache_get_the_answers_they_get_alone(server: Server) -> None:
    prompts = [[100 + i] * 40 for i in range(4)]
    alone = [complete(server, prompt, 60)[0] for prompt in prompts]
    before = metric(server, "vllm:num_preemptions_total")
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
        answers = await asyncio.gather(
            *(client.post(f"{server.base_url}/completions", json={**body, "prompt": p}) for p in prompts)
        )
    assert [answer.json()["choices"][0]["text"] for answer in answers] == alone
    assert metric(server, "vllm:num_preemptions_total") > before


async def test_prompts_beyond_the_queue_of_tokens_are_told_to_come_back(server: Server) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"prompt": [5] * 60, "max_tokens": 50, "temperature": 0, "ignore_eos": True}
        answers = await asyncio.gather(*(client.post(f"{server.base_url}/completions", json=body) for _ in range(8)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 1 <= len(refused) <= 4, "two run, two more prompts of 60 are within 150"
    for answer in refused:
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        assert "this one has 60, and the queue holds 150 (--max-num-queued-tokens)" in answer.json()["error"]["message"]
