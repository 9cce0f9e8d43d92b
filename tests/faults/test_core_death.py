"""The core dies, hangs, or is left alone; the server's side notices, says so, and starts it and its work again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from headrace.config.settings import EngineSettings
from headrace.protocol.errors import ApiError
from headrace.protocol.ipc import BACKGROUND_PRIORITY, SamplingParams
from headrace.server.core_start import start_core
from headrace.server.engine_client import EngineClient
from headrace.server.supervisor import Backoff
from tests.dying_core import DEADLY
from tests.tiny_models import tiny_llama

LONG = SamplingParams(max_tokens=450, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", autouse=True)
def short_waits():
    """A core is started again after a tenth of a second, and twice that at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backoff, "FIRST_S", 0.1)
        patch.setattr(Backoff, "LONGEST_S", 0.2)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(model) -> AsyncIterator[EngineClient]:
    """One server's side for all faults: each test leaves it with a healthy core."""
    settings = EngineSettings(
        model=str(model), dtype="float32", threads=1, kv_cache_memory_bytes=4 << 20, step_timeout_s=1.0
    )
    running = EngineClient(settings, start_core=partial(start_core, "tests.dying_core"))
    await running.start()
    await running.wait_ready()
    yield running
    await running.stop()


async def tokens(client: EngineClient, name: str, prompt: list[int], max_tokens: int = 40, **how) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [token async for output in client.generate(name, prompt, params, **how) for token in output.token_ids]


async def until(condition, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_core_fails_the_streams_it_had_begun_and_comes_back(client):
    started = [client.generate(f"r{i}", [1, 2, 3 + i], LONG) for i in range(3)]
    for stream in started:
        await anext(stream)
    killed_at = time.monotonic()
    os.kill(client.core_pid, signal.SIGKILL)
    for stream in started:
        with pytest.raises(ApiError) as error:
            async for _ in stream:
                pass
        assert (error.value.status, error.value.code) == (503, "engine_restarting")
    assert time.monotonic() - killed_at < 1
    assert client.state == "restarting" and not client.healthy
    with pytest.raises(ApiError, match=r"SIGKILL.*It is (restarted in 0\.\d s|being restarted)") as error:
        await anext(client.generate("meanwhile", [1], LONG))
    assert error.value.status == 503 and int(error.value.headers["retry-after"]) >= 1
    await until(lambda: client.healthy, 15)
    assert client.num_open_requests == 0 and client.num_restarts >= 1
    last = [output async for output in client.generate("after", [1, 2, 3], SamplingParams(max_tokens=5))][-1]
    assert last.finish_reason is not None


@pytest.mark.asyncio(loop_scope="module")
async def test_what_was_not_sent_yet_is_done_again_by_the_next_core(client):
    """One answer was begun and not sent, two more had not begun; nobody who asked notices more than a pause."""
    expected = await asyncio.gather(*(tokens(client, f"before{i}", [9, 8, 7, i], 400) for i in range(3)))
    whole = asyncio.create_task(tokens(client, "whole", [9, 8, 7, 0], 400, streamed=False))
    await until(lambda: client._streams["whole"].num_received > 20 if "whole" in client._streams else False, 5)
    streams = [asyncio.create_task(tokens(client, f"stream{i}", [9, 8, 7, i], 400)) for i in (1, 2)]
    await asyncio.sleep(0)
    os.kill(client.core_pid, signal.SIGKILL)
    async with asyncio.timeout(15):
        assert await asyncio.gather(whole, *streams) == expected
    assert client.num_open_requests == 0 and not client._replays


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("deadly_at", [3, 12], ids=["at its first step", "in the middle of its answer"])
async def test_a_request_that_kills_every_core_fails_alone(client, deadly_at):
    """It is there at two deaths. The others, which were with it both times, are done again and get all their tokens."""
    expected = [await tokens(client, f"good{i}", [5, 6, 7, i]) for i in range(4)]
    restarts = client.num_restarts
    prompts = [[5, 6, 7, 0], [5, 6, 7, 1], [DEADLY, deadly_at, 1], [5, 6, 7, 2], [5, 6, 7, 3]]
    async with asyncio.timeout(15):
        results = await asyncio.gather(
            *(tokens(client, f"r{i}", prompt, streamed=False) for i, prompt in enumerate(prompts)),
            return_exceptions=True,
        )
    killer = results.pop(2)
    assert isinstance(killer, ApiError) and (killer.status, killer.code) == (500, "request_kills_engine")
    assert "died 2 times while it worked on this request" in killer.message
    assert killer.headers["x-should-retry"] == "false"
    assert results == expected
    assert client.num_restarts == restarts + 2


@pytest.mark.asyncio(loop_scope="module")
async def test_after_a_death_no_person_waits_for_a_batch(client):
    """Its lines are done again one after the other, which takes long; who asks meanwhile is answered between."""
    lines = [
        asyncio.create_task(tokens(client, f"line{i}", [9, 8, 7, i], 400, streamed=False, priority=BACKGROUND_PRIORITY))
        for i in range(6)
    ]
    started = lambda: all((s := client._streams.get(f"line{i}")) and s.num_received > 30 for i in range(6))  # noqa: E731
    await until(started, 10)
    os.kill(client.core_pid, signal.SIGKILL)
    await until(lambda: not client.healthy, 5)
    await until(lambda: client.healthy, 15)
    for number in range(3):
        assert len(await tokens(client, f"person{number}", [1, 2, number], 5)) == 5
        assert client._replays, "lines of the batch wait for their turn still"
    async with asyncio.timeout(60):
        assert [len(line) for line in await asyncio.gather(*lines)] == [400] * 6


@pytest.mark.asyncio(loop_scope="module")
async def test_a_reader_who_takes_nothing_is_not_mistaken_for_a_stuck_core(client):
    stream = client.generate("slow reader", [4, 5, 6], SamplingParams(max_tokens=5, temperature=0.0))
    await anext(stream)
    await asyncio.sleep(2.5)
    assert client.healthy
    assert [output.finish_reason async for output in stream][-1] == "length"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stuck_core_is_reported_then_killed_and_replaced(client):
    stream = client.generate("stuck", [1, 2, 3], LONG)
    await anext(stream)
    pid = client.core_pid
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: not client.healthy, 3)
    assert client.state == "ready" and client.core_pid == pid
    with pytest.raises(ApiError, match=r"engine process was stuck \(no step finished for [\d.]+ s\)") as told:
        async for _ in stream:
            pass
    assert "memory" not in told.value.message, "it was ended here, and not by the system"
    await until(lambda: client.healthy, 15)
    assert client.core_pid != pid and not Path(f"/proc/{pid}").exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stopped_core_without_work_is_not_blamed(client):
    pid = client.core_pid
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(2.5)
    assert client.healthy
    os.kill(pid, signal.SIGCONT)
    assert await client.control("reset_prefix_cache") >= 0
    assert client.core_pid == pid


SERVER_THAT_DIES = """
import asyncio, os, signal, sys
from headrace.config.settings import EngineSettings
from headrace.server.core_start import start_core
from headrace.server.engine_client import EngineClient

async def main():
    settings = EngineSettings(model=sys.argv[1], threads=1, kv_cache_memory_bytes=4 << 20)
    client = EngineClient(settings, start_core=lambda: start_core("tests.dying_core"))
    await client.start()
    await client.wait_ready()
    print(client.core_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_core_ends_when_its_server_is_killed(model):
    server = subprocess.Popen([sys.executable, "-c", SERVER_THAT_DIES, str(model)], stdout=subprocess.PIPE, text=True)
    core = psutil.Process(int(server.stdout.readline()))
    server.kill()
    server.wait()
    server.stdout.close()
    assert core.wait(timeout=2) is not None or not core.is_running()
