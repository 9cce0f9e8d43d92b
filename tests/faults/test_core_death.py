"""The core dies, hangs, or is left alone; the server's side notices, says so, and starts it again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from headrace.config.settings import EngineSettings
from headrace.protocol.errors import ApiError
from headrace.protocol.ipc import SamplingParams
from headrace.server.engine_client import EngineClient
from tests.tiny_models import tiny_llama

LONG = SamplingParams(max_tokens=450, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(model) -> AsyncIterator[EngineClient]:
    """One server's side for all faults: each test leaves it with a healthy core."""
    settings = EngineSettings(
        model=str(model), dtype="float32", threads=1, kv_cache_memory_bytes=4 << 20, step_timeout_s=1.0
    )
    running = EngineClient(settings)
    await running.start()
    await running.wait_ready()
    yield running
    await running.stop()


async def until(condition, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_core_fails_its_requests_and_comes_back(client):
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
    with pytest.raises(ApiError) as error:
        await anext(client.generate("meanwhile", [1], LONG))
    assert error.value.status == 503 and int(error.value.headers["retry-after"]) >= 1
    await until(lambda: client.healthy, 15)
    assert client.num_open_requests == 0 and client.num_restarts == 1
    last = [output async for output in client.generate("after", [1, 2, 3], SamplingParams(max_tokens=5))][-1]
    assert last.finish_reason is not None


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stuck_core_is_reported_then_killed_and_replaced(client):
    stream = client.generate("stuck", [1, 2, 3], LONG)
    await anext(stream)
    pid = client.core_pid
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: not client.healthy, 3)
    assert client.state == "ready" and client.core_pid == pid
    with pytest.raises(ApiError, match="engine process"):
        async for _ in stream:
            pass
    await until(lambda: client.healthy, 15)
    assert client.core_pid != pid and not Path(f"/proc/{pid}").exists()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stopped_core_without_work_is_not_blamed(client):
    pid = client.core_pid
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(2.5)
    assert client.healthy
    os.kill(pid, signal.SIGCONT)
    assert await client.reset_prefix_cache() >= 0
    assert client.core_pid == pid


SERVER_THAT_DIES = """
import asyncio, os, signal, sys
from headrace.config.settings import EngineSettings
from headrace.server.engine_client import EngineClient

async def main():
    client = EngineClient(EngineSettings(model=sys.argv[1], threads=1, kv_cache_memory_bytes=4 << 20))
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
