"""Routes for whoever runs the server: who may use them, and that they do what they say to a real engine."""

from __future__ import annotations

import asyncio
import pstats
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from headrace.config.model_files import open_model
from headrace.config.settings import EngineSettings
from headrace.protocol.errors import ApiError
from headrace.protocol.ipc import SamplingParams
from headrace.server.app import App, create_app
from headrace.server.engine_client import EngineClient
from headrace.server.metrics import EngineMetrics
from headrace.server.model_text import model_text
from headrace.server.routes import ROUTES
from tests.scripted_engine import ScriptedEngine, asgi_client, make_app, server_settings
from tests.tiny_models import tiny_llama

ADMIN = [(route.method, route.path) for route in ROUTES if route.admin]


async def status(app: App, method: str, path: str, **headers: str) -> tuple[int, str | None]:
    async with asgi_client(app) as client:
        answer = await client.request(method, path, headers=headers, json={"all": True} if "abort" in path else None)
    return answer.status_code, answer.json().get("error", {}).get("code") if answer.status_code >= 400 else None


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_admin_routes_are_for_holders_of_the_key(method: str, path: str, tmp_path: Path) -> None:
    settings = server_settings(api_keys=("secret",), host="0.0.0.0", profiler_dir=str(tmp_path))
    app = make_app(ScriptedEngine(), settings)
    assert await status(app, method, path) == (401, "missing_api_key")
    assert (await status(app, method, path, authorization="Bearer wrong"))[0] == 401
    assert (await status(app, method, path, authorization="Bearer secret"))[0] == 200


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_without_a_key_they_are_closed_beyond_this_machine_and_to_pages_from_elsewhere(
    method: str, path: str, tmp_path: Path
) -> None:
    beyond = make_app(ScriptedEngine(), server_settings(host="0.0.0.0", profiler_dir=str(tmp_path)))
    assert await status(beyond, method, path) == (403, "admin_needs_key")
    here = make_app(ScriptedEngine(), server_settings(host="127.0.0.1", profiler_dir=str(tmp_path)))
    assert (await status(here, method, path))[0] == 200
    assert await status(here, method, path, origin="http://elsewhere.example") == (403, "origin_not_allowed")


async def test_server_info_tells_the_settings_and_no_key() -> None:
    app = make_app(ScriptedEngine(), server_settings(api_keys=("top-secret",)), policy="priority")
    async with asgi_client(app, headers={"authorization": "Bearer top-secret"}) as client:
        answer = await client.get("/server_info")
    info = answer.json()
    assert "top-secret" not in answer.text
    assert info["engine_settings"]["scheduling_policy"] == "priority"
    assert (info["engine"]["max_model_len"], info["state"], info["num_restarts"]) == (512, "ready", 0)


async def test_profiles_want_a_directory() -> None:
    app = make_app(ScriptedEngine())
    assert await status(app, "POST", "/start_profile") == (400, "not_enabled")


@pytest.mark.parametrize(
    ("query", "param"), [("/sleep?level=3", "level"), ("/sleep?mode=keep", "mode"), ("/wake_up?tags=weights", "tags")]
)
async def test_what_sleep_does_not_know_is_refused_by_name(query: str, param: str) -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        error = (await client.post(query)).json()["error"]
    assert error["param"] == param


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_what_an_admin_route_would_not_hear_is_refused(method: str, path: str, tmp_path: Path) -> None:
    app = make_app(ScriptedEngine(), server_settings(profiler_dir=str(tmp_path)))
    async with asgi_client(app) as client:
        misspelt = await client.request(method, f"{path}?lvl=2", json={"all": True} if "abort" in path else None)
        assert (misspelt.status_code, misspelt.json()["error"]["param"]) == (400, "lvl")
        assert '"lvl" in the address would be ignored' in misspelt.text.replace("\\", "")
        if "abort" in path:
            return
        in_body = await client.request(method, path, json={"level": 2})
        assert (in_body.status_code, in_body.json()["error"]["param"]) == (400, "level")
        says = f"POST {path}?level=... says it" if path == "/sleep" else "in the body would be ignored"
        assert says in in_body.json()["error"]["message"]
        assert (await client.request(method, path, json={})).status_code == 200, "nothing is asked for"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, 200, "chat.completion"),
        ({"prompt": "Hi", "max_tokens": 4}, 200, "text_completion"),
        ({"input": "Hi"}, 400, "--runner pooling"),
        ({"question": "Hi"}, 400, "`messages`"),
    ],
)
async def test_invocations_is_what_its_body_asks_for(body: dict, status: int, says: str) -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = await client.post("/invocations", json=body)
    assert answer.status_code == status
    assert says in answer.text


# with a real engine


KV_CACHE_BYTES = 64 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """8 KiB of KV cache a token in float32, so that a few prompts touch a lot of it."""
    return tiny_llama(tmp_path_factory.mktemp("wide"), kv_heads=4, head_dim=128, max_positions=1024)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(model, tmp_path_factory) -> AsyncIterator[App]:
    engine = EngineSettings(model=str(model), dtype="float32", threads=1, kv_cache_memory_bytes=KV_CACHE_BYTES)
    server = server_settings(served_model_names=("wide",), profiler_dir=str(tmp_path_factory.mktemp("profiles")))
    metrics = EngineMetrics("wide")
    client = EngineClient(engine, metrics)
    await client.start()
    text = model_text(engine, server, open_model(model))
    yield_ = create_app(server, engine, client, text.tokenizer, text.template, generation_config={}, metrics=metrics)
    await client.wait_ready()
    yield yield_
    await client.stop()


def core_pss(app: App) -> int:
    return psutil.Process(app.serving.client.core_pid).memory_full_info().pss


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def fill(app: App) -> None:
    """Touch about 40 MiB of the KV cache."""

    async def one(number: int) -> None:
        prompt = [(number * 7 + i) % 200 for i in range(1000)]
        async for _ in app.serving.client.generate(f"fill{number}", prompt, SamplingParams(max_tokens=1)):
            pass

    await asyncio.gather(*(one(number) for number in range(5)))


async def answer_of(app: App) -> str:
    async with asgi_client(app) as client:
        body = {"prompt": "The wheel", "max_tokens": 8, "temperature": 0}
        return (await client.post("/v1/completions", json=body)).raise_for_status().json()["choices"][0]["text"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeping_engine_gives_its_memory_back_and_wakes_up_the_same(app: App, level: int) -> None:
    expected = await answer_of(app)
    await fill(app)
    engine = app.serving.client
    full, pid = core_pss(app), engine.core_pid
    async with asgi_client(app) as client:
        assert (await client.post(f"/sleep?level={level}")).json() == {"is_sleeping": True, "level": level}
        if level == 1:
            assert core_pss(app) < full - (30 << 20)
        else:
            assert not Path(f"/proc/{pid}").exists()
        refused = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
        assert int(refused.headers["retry-after"]) > 0
        health, ready = await client.get("/health"), await client.get("/ready")
        assert (health.status_code, health.json(), ready.status_code) == (200, {"status": "sleeping"}, 503)
        state = {1: "weights_offloaded", 2: "discard_all"}[level]
        metrics = (await client.get("/metrics")).text
        line = next(li for li in metrics.splitlines() if "engine_sleep_state{" in li and f'"{state}"' in li)
        assert line.endswith(" 1.0")
        assert (await client.post("/wake_up")).json() == {"is_sleeping": False, "level": 0}
        assert (await client.get("/ready")).status_code == 200
    assert await answer_of(app) == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_sleep_ends_running_requests_or_waits_for_them(app: App) -> None:
    async def long(name: str) -> str | None:
        params = SamplingParams(max_tokens=1000, temperature=0.0)
        async for output in app.serving.client.generate(name, [1, 2, 3], params):
            if output.finish_reason is not None:
                return output.finish_reason
        return None

    async def begun(name: str) -> asyncio.Task:
        task = asyncio.create_task(long(name))
        await until(lambda: app.serving.client.num_open_requests)
        return task

    async with asgi_client(app) as client:
        running = await begun("patient")
        await client.post("/sleep?mode=wait")
        assert running.done() and running.result() == "length"
        await client.post("/wake_up")
        running = await begun("cut off")
        await client.post("/sleep")
        with pytest.raises(ApiError) as error:
            await running
        assert (error.value.status, error.value.code) == (503, "sleeping")
        await client.post("/wake_up")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_core_that_dies_asleep_is_started_by_waking_up(app: App) -> None:
    expected = await answer_of(app)
    engine = app.serving.client
    async with asgi_client(app) as client:
        await client.post("/sleep?level=1")
        psutil.Process(engine.core_pid).kill()
        await until(lambda: engine.sleep_level == 2)
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True, "level": 2}
        await client.post("/wake_up")
    assert await answer_of(app) == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_a_profile_is_a_file_that_pstats_reads(app: App) -> None:
    async with asgi_client(app) as client:
        assert (await client.post("/stop_profile")).json()["error"]["code"] == "conflict"
        assert (await client.post("/start_profile")).status_code == 200
        assert (await client.post("/start_profile")).json()["error"]["code"] == "conflict"
        await answer_of(app)
        path = (await client.post("/stop_profile")).json()["path"]
    functions = {name for _, _, name in pstats.Stats(path).stats}
    assert {"schedule", "execute", "update"} <= functions


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("by", ["answer", "x-request-id", "all"])
async def test_requests_are_ended_by_either_id_or_all_at_once(app: App, by: str) -> None:
    """They end as finished, with the reason "abort" and the text so far: an SDK must not send them again."""
    body = {"prompt": ["One", "Two"], "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    async with asgi_client(app) as client:
        running = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "mine"}))
        await until(lambda: app.serving.client.num_open_requests == 2)
        (exchange,) = [e for e in app.serving.exchanges if e.answer_id is not None]
        name = {"answer": exchange.answer_id, "x-request-id": "mine"}.get(by)
        asked = {"all": True} if by == "all" else {"request_ids": [name, "nobody"]}
        told = (await client.post("/abort_requests", json=asked)).json()
        assert told["aborted"] == [f"{exchange.answer_id}-0", f"{exchange.answer_id}-1"]
        assert told["unknown"] == ([] if by == "all" else ["nobody"])
        answer = (await running).raise_for_status().json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
