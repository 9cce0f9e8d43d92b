"""Requests that ask for many answers: they are let in whole or not at all, and others are served beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.protocol import ipc
from tests.scripted_engine import ScriptedEngine, asgi_client, for_ever, make_app, until
from tests.serving import Server, running_server
from tests.tiny_models import tiny_llama

NUM_RUNNING, NUM_WAITING = 2, 8
PLACES = NUM_RUNNING + NUM_WAITING


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two run, eight wait."""
    place = tmp_path_factory.mktemp("large")
    model = tiny_llama(place, max_positions=4096)
    flags = f"{model} --threads 1 --max-num-seqs {NUM_RUNNING} --max-num-queued-reqs {NUM_WAITING}"
    flags += " --kv-cache-memory-bytes 32M --max-num-queued-tokens 400"
    with running_server(place / "server.log", flags.split()) as server:
        yield server


def ask(server: Server, **body: object) -> httpx.Response:
    usual = {"prompt": "b", "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json={**usual, **body}, timeout=60)


@asynccontextmanager
async def streaming(server: Server, **body: object) -> AsyncIterator[httpx.Response]:
    """A request that has begun to be answered."""
    usual = {"prompt": "b", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=60) as client:
        request = client.build_request("POST", f"{server.url}/v1/completions", json={**usual, **body})
        answer = await client.send(request, stream=True)
        assert answer.status_code == 200, await answer.aread()
        try:
            yield answer
        finally:
            await answer.aclose()


@pytest.mark.parametrize(
    ("body", "param", "asked"),
    [
        ({"prompt": ["b"] * 1024, "n": 128}, "prompt", "131072 answers (1024 prompts, 128 each)"),
        ({"prompt": ["b"] * (PLACES + 1)}, "prompt", "11 answers"),
        ({"prompt": ["b"] * 6, "n": 2}, "prompt", "12 answers (6 prompts, 2 each)"),
        ({"n": PLACES + 1}, "n", "11 answers"),
        ({"best_of": PLACES + 1}, "best_of", "11 answers"),
    ],
)
def test_more_answers_than_an_idle_server_has_places_for_are_refused_naming_limits_and_the_way(
    small: Server, body: dict[str, Any], param: str, asked: str
) -> None:
    answer = ask(small, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "too_many_sequences", param)
    for part in (asked, "places for 10", "--max-num-queued-reqs", "--max-num-seqs", "several requests", "run-batch"):
        assert part in error["message"]


def test_every_dialect_has_the_same_limit(small: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "b"}], "n": PLACES + 1, "max_tokens": 1}
    answer = httpx.post(f"{small.url}/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_sequences")


def test_an_idle_server_answers_as_many_as_it_has_places_for(small: Server) -> None:
    for body in ({"prompt": ["b"] * PLACES}, {"prompt": ["b"] * 5, "n": 2}, {"n": PLACES}, {"prompt": ["b" * 50] * 10}):
        answer = ask(small, **body, temperature=1)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(PLACES))
        assert {choice["finish_reason"] for choice in choices} == {"length"}


def test_prompts_that_would_overflow_the_queues_tokens_even_when_idle_are_refused(small: Server) -> None:
    answer = ask(small, prompt=["b" * 60] * 9)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "too_many_sequences")
    assert "have 420 tokens, and the queue holds 400 (--max-num-queued-tokens)" in error["message"]


def test_siblings_with_a_grammar_are_not_refused_because_of_each_other(small: Server) -> None:
    answer = ask(small, prompt=["b"] * PLACES, guided_regex="(a|b){2}")
    assert answer.status_code == 200, answer.text
    assert all(set(choice["text"]) <= set("ab") for choice in answer.json()["choices"])


@pytest.mark.asyncio
async def test_every_answer_of_an_open_request_takes_a_place_until_it_is_done(small: Server) -> None:
    for open_request in ({"n": 7, "temperature": 1}, {"prompt": ["b"] * 7}):
        async with streaming(small, **open_request):
            refused = await asyncio.to_thread(ask, small, prompt=["b"] * 4)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert "this request asks for 4 answers, and the queue holds 8" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
        let_in = await asyncio.to_thread(ask, small, prompt=["b"] * PLACES)
        assert let_in.status_code == 200, let_in.text


@pytest.mark.asyncio
async def test_a_small_request_is_not_kept_waiting_for_all_of_a_large_one(small: Server) -> None:
    """Of nine long answers two run and one waits with the engine; the small request comes right behind that one."""

    def asked() -> tuple[int, float]:
        return ask(small).status_code, time.monotonic()

    async with streaming(small, prompt=["b"] * 9, max_tokens=800) as large:
        beside = asyncio.create_task(asyncio.to_thread(asked))
        ended_at = [time.monotonic() async for line in large.aiter_lines() if '"finish_reason":"length"' in line]
    status, answered_at = await beside
    assert (status, len(ended_at)) == (200, 9)
    assert sum(ended < answered_at for ended in ended_at) <= 5


@pytest.mark.asyncio
async def test_a_request_for_as_many_answers_as_possible_holds_up_nobody(tmp_path: Path) -> None:
    """The event loop gets on: /health and a small request are answered while a thousand prompts are read, sent,
    computed and written."""
    flags = f"{tiny_llama(tmp_path)} --threads 1 --kv-cache-memory-bytes 64M"
    with running_server(tmp_path / "server.log", flags.split()) as server:
        slowest = 0.0
        async with httpx.AsyncClient(timeout=60, base_url=server.url) as client:
            body = {"prompt": ["the wheel turns"] * 1024, "max_tokens": 2, "ignore_eos": True}
            large = asyncio.create_task(client.post("/v1/completions", json=body))
            small = asyncio.create_task(client.post("/v1/completions", json={"prompt": "b", "max_tokens": 2}))
            while not large.done():
                began = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                slowest = max(slowest, time.monotonic() - began)
                await asyncio.sleep(0.02)
            assert len(large.result().json()["choices"]) == 1024
            assert (await small).status_code == 200
        assert slowest < 1.0


# in what order prompts are sent


@pytest.mark.asyncio
async def test_prompts_are_sent_as_the_engine_gets_on_and_none_after_the_client_left() -> None:
    engine = ScriptedEngine(script=for_ever, step_s=0.001, most_open=4)
    async with asgi_client(make_app(engine)) as client:
        body = {"prompt": ["b"] * 9, "n": 2, "max_tokens": 5, "temperature": 1}
        answer = await client.post("/v1/completions", json=body)
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(18))
        assert [request.request_id.rpartition("-")[2] for request in engine.requests] == [str(i) for i in range(9)]

        engine.requests.clear()
        task = asyncio.create_task(client.post("/v1/completions", json={**body, "max_tokens": 200}))
        async with asyncio.timeout(5):
            while len(engine.requests) < 2:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert len(engine.running) == 2, "four sequences at a time, two of each prompt"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert len(engine.requests) == 2
        assert until(lambda: not engine.running)


@pytest.mark.asyncio
async def test_a_prompt_that_fails_ends_its_siblings_and_the_rest_is_never_sent() -> None:
    engine = ScriptedEngine(script=for_ever, most_open=2, fails_after=3, failure=RuntimeError("it fell"))
    async with asgi_client(make_app(engine)) as client:
        answer = await client.post("/v1/completions", json={"prompt": ["b"] * 50, "max_tokens": 20})
    assert answer.status_code == 500
    assert len(engine.requests) <= 4
    assert until(lambda: not engine.running)


def test_a_priority_tells_what_is_background() -> None:
    assert not ipc.is_background(2**31 - 1)
    assert ipc.is_background(ipc.BACKGROUND_PRIORITY - 2**31)
