"""Requests through the engine client to a real core with a tiny random model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.config.settings import EngineSettings
from headrace.protocol.errors import ApiError
from headrace.protocol.ipc import SamplingParams, SequenceOutput
from headrace.server.engine_client import EngineClient, StartupError
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(b"the wheel turns")


def settings(model: Path, **changes) -> EngineSettings:
    values = {
        "model": str(model),
        "dtype": "float32",
        "threads": 1,
        "kv_cache_memory_bytes": 4 << 20,
        "max_num_seqs": 4,
        "max_num_queued_reqs": 4,
        "max_num_batched_tokens": 64,
    }
    return EngineSettings(**{**values, **changes})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(model) -> AsyncIterator[EngineClient]:
    running = EngineClient(settings(model))
    await running.start()
    await running.wait_ready()
    yield running
    await running.stop()


async def outputs(client: EngineClient, name: str, tokens=PROMPT, **params) -> list[SequenceOutput]:
    chosen = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **params})
    return [output async for output in client.generate(name, tokens, chosen)]


async def tokens(client: EngineClient, name: str, prompt=PROMPT, **params) -> list[int]:
    return [token for output in await outputs(client, name, prompt, **params) for token in output.token_ids]


async def idle(client: EngineClient) -> None:
    async with asyncio.timeout(5):
        while client.last_stats is None or client.last_stats.num_running or client.last_stats.kv_blocks_used:
            await asyncio.sleep(0.01)


async def test_a_request_gets_all_its_tokens_and_a_reason(client):
    got = await outputs(client, "one")
    assert sum(len(o.token_ids) for o in got) == 12
    assert [o.finish_reason for o in got][-1] == "length"
    assert all(o.finish_reason is None for o in got[:-1])
    await idle(client)


async def test_many_at_once_get_what_each_gets_alone(client):
    prompts = [[*PROMPT[:4], i] for i in range(8)]
    alone = [await tokens(client, f"alone{i}", p) for i, p in enumerate(prompts)]
    together = await asyncio.gather(*(tokens(client, f"together{i}", p) for i, p in enumerate(prompts)))
    assert together == alone
    await idle(client)


async def test_leaving_a_stream_frees_its_blocks(client):
    async with aclosing(client.generate("leaver", PROMPT, SamplingParams(max_tokens=400))) as stream:
        async for _ in stream:
            break
    assert client.num_open_requests == 0
    await idle(client)


async def test_cancelling_the_reader_aborts_too(client):
    reader = asyncio.create_task(outputs(client, "cancelled", max_tokens=400))
    while client.num_open_requests == 0:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert client.num_open_requests == 0
    await idle(client)


async def test_a_slow_reader_gets_fewer_outputs_and_every_token(client):
    expected = await tokens(client, "fast", max_tokens=60)
    got: list[SequenceOutput] = []
    async for output in client.generate("slow", PROMPT, SamplingParams(max_tokens=60, temperature=0.0)):
        got.append(output)
        await asyncio.sleep(0.1)
    assert [token for output in got for token in output.token_ids] == expected
    assert len(got) < 40


async def test_every_sequence_of_n_ends_for_itself(client):
    got = await outputs(client, "three", n=3, temperature=1.0, seed=7)
    assert sorted(o.index for o in got if o.finish_reason is not None) == [0, 1, 2]
    by_index = {i: [t for o in got if o.index == i for t in o.token_ids] for i in range(3)}
    assert all(by_index.values())
    assert len({tuple(t) for t in by_index.values()}) > 1


async def test_aborting_one_sequence_leaves_the_others(client):
    seen: dict[int, int] = {}
    finished = set()
    async for output in client.generate("pair", PROMPT, SamplingParams(max_tokens=50, n=2, temperature=1.0, seed=3)):
        seen[output.index] = seen.get(output.index, 0) + len(output.token_ids)
        if output.index == 0:
            client.abort("pair", 0, "stop")
        if output.finish_reason is not None:
            finished.add(output.index)
    assert finished == {1}
    assert seen[0] < seen[1] == 50
    await idle(client)


async def test_a_request_beyond_the_context_is_refused_with_400(client):
    with pytest.raises(ApiError) as error:
        await outputs(client, "long", max_tokens=600)
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    assert "512" in error.value.message
    assert client.num_open_requests == 0


async def test_over_the_queue_limit_is_429_with_retry_after(client):
    results = await asyncio.gather(
        *(outputs(client, f"crowd{i}", max_tokens=100) for i in range(24)), return_exceptions=True
    )
    refused = [r for r in results if isinstance(r, ApiError)]
    assert refused and all((r.status, r.code) == (429, "queue_full") for r in refused)
    assert int(refused[0].headers["retry-after"]) >= 1
    served = [r for r in results if isinstance(r, list)]
    assert len(served) >= 8 and all(r[-1].finish_reason is not None for r in served)
    assert len(served) + len(refused) == 24
    await idle(client)


async def test_a_request_id_in_use_is_refused(client):
    stream = client.generate("twice", PROMPT, SamplingParams(max_tokens=50))
    await anext(stream)
    with pytest.raises(ApiError, match="in use"):
        await outputs(client, "twice")
    await stream.aclose()


async def test_resetting_the_prefix_cache_makes_the_next_request_cold(client):
    long_prompt = list(range(1, 101))
    await outputs(client, "cold", long_prompt)
    warm = await outputs(client, "warm", long_prompt)
    assert warm[0].num_cached_tokens >= 64
    await idle(client)
    assert await client.control("reset_prefix_cache") > 0
    assert (await outputs(client, "cold again", long_prompt))[0].num_cached_tokens == 0
    assert await client.control("reset_prefix_cache") > 0


async def test_a_request_is_in_the_gauges_from_when_it_is_sent_until_its_end(client):
    def shown(gauge: str) -> float:
        text = client.metrics.render().decode()
        return float(next(li for li in text.splitlines() if li.startswith(f"vllm:num_requests_{gauge}{{")).split()[-1])

    await idle(client)
    asking = [asyncio.create_task(outputs(client, f"counted {i}", n=2)) for i in range(3)]
    await asyncio.sleep(0)
    assert (shown("running"), shown("waiting")) == (4, 2)
    await asyncio.gather(*asking)
    assert (shown("running"), shown("waiting")) == (0, 0)


async def test_what_happened_is_in_the_metrics(client):
    text = client.metrics.render().decode()
    for reason in ("length", "abort"):
        line = next(li for li in text.splitlines() if "request_success_total" in li and f'"{reason}"' in li)
        assert float(line.rsplit(" ", 1)[1]) > 0
    assert 'vllm:cache_config_info{block_size="32"' in text
    assert 'headrace:resident_memory_bytes{process="core"}' in text


async def test_while_loading_requests_get_503_and_stopping_leaves_nothing(model):
    starting = EngineClient(settings(model))
    await starting.start()
    pid = starting.core_pid
    assert starting.state == "loading" and not starting.healthy
    with pytest.raises(ApiError) as error:
        await outputs(starting, "early")
    assert (error.value.status, error.value.code) == (503, "engine_loading")
    assert "retry-after" in error.value.headers
    await starting.stop(patience_s=0)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(StartupError):
        await starting.wait_ready()


async def test_a_start_that_cannot_work_says_what_to_change(model):
    broken = EngineClient(settings(model, kv_cache_memory_bytes=100_000, max_model_len=512))
    await broken.start()
    with pytest.raises(StartupError, match=r"--kv-cache-memory-bytes \d+"):
        await broken.wait_ready()
    assert broken.state == "failed"
    await broken.stop()


async def test_without_torch_the_start_says_what_to_install(model, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError(\"No module named 'torch'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    client = EngineClient(settings(model, kernels="reference"))
    await client.start()
    with pytest.raises(StartupError, match="pip install"):
        await client.wait_ready()
    await client.stop()


async def test_draining_lets_the_running_finish_and_takes_no_more(client):
    """The last test of this file: the client takes no requests after it."""
    running = asyncio.create_task(outputs(client, "last", max_tokens=100))
    while client.num_open_requests == 0:
        await asyncio.sleep(0)
    client.begin_drain()
    with pytest.raises(ApiError) as error:
        await outputs(client, "too late")
    assert (error.value.status, error.value.code) == (503, "draining")
    assert await client.drain(10)
    assert (await running)[-1].finish_reason is not None
