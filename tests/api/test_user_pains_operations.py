"""What people suffer with inference servers, part 3: starting them, watching them, changing their version.

A server is a real `EngineClient` with a real core process behind the real application; commands and files are read as
`headrace serve` reads them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import pytest_asyncio

from headrace.cli.startup import block_lines
from headrace.config.command_line import parse_command_line
from headrace.config.errors import ConfigError
from headrace.config.load import LaunchError, load, settings
from headrace.config.model_files import open_model
from headrace.config.resolve import resolve_model
from headrace.config.settings import EngineSettings
from headrace.runtime import devices
from headrace.server.app import App, create_app
from headrace.server.core_start import start_core
from headrace.server.engine_client import EngineClient
from headrace.server.metrics import EngineMetrics
from headrace.server.model_text import model_text
from tests.scripted_engine import asgi_client, server_settings
from tests.serving import running_server
from tests.tiny_models import tiny_llama

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def serving(model: Path, core_module: str = "headrace.core", **changes: Any) -> AsyncIterator[App]:
    engine = EngineSettings(model=str(model), threads=1, kv_cache_memory_bytes=8 << 20, **changes)
    server = server_settings(served_model_names=("tiny",))
    metrics = EngineMetrics("tiny")
    client = EngineClient(engine, metrics, start_core=partial(start_core, core_module))
    await client.start()
    try:
        text = model_text(engine, server, open_model(model))
        app = create_app(server, engine, client, text.tokenizer, text.template, generation_config={}, metrics=metrics)
        await client.wait_ready()
        yield app
    finally:
        await client.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), bundled_tokenizer=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(model) -> AsyncIterator[App]:
    async with serving(model) as running:
        yield running


async def complete(app: App, **fields: object) -> httpx.Response:
    async with asgi_client(app, timeout=30) as client:
        return await client.post("/v1/completions", json={"prompt": "A", "max_tokens": 4, **fields})


async def until(condition: Any, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_d04_the_engine_is_frozen_and_health_says_200_for_hours(model):
    """The load balancer sends more, and everybody waits for ever. Ours answers 503 when work waits and no step ends,
    kills what stays frozen, starts another, and those who wait get an answer."""
    async with (
        serving(model, "tests.dying_core", step_timeout_s=0.5) as app,
        asgi_client(app, timeout=30) as client,
    ):
        engine = app.serving.client

        async def health(status: int) -> bool:
            return (await client.get("/health")).status_code == status

        assert await health(200)
        expected = (await complete(app, max_tokens=30, ignore_eos=True)).json()["choices"]
        os.kill(engine.core_pid, signal.SIGSTOP)
        waiting = asyncio.create_task(complete(app, max_tokens=30, ignore_eos=True))
        await until(lambda: health(503))
        assert (await client.get("/health")).json()["error"]["code"] == "engine_stuck"
        assert (await asyncio.wait_for(waiting, 12)).json()["choices"] == expected
        await until(lambda: health(200))


async def test_d06_long_texts_leave_a_hundred_megabytes_behind(model, tmp_path):
    """Every thread that once read one keeps a heap of its own. Ours keeps two for all of them."""
    flags = ("--model", str(model), "--kv-cache-memory-bytes", "8M")
    with running_server(tmp_path / "server.log", flags) as server:
        before = server.process.memory_full_info().uss
        async with httpx.AsyncClient(timeout=120) as client:
            body = {"prompt": "word " * 20_000}
            asked = [client.post(server.base_url + "/completions", json=body) for _ in range(12)]
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {400}
        assert server.process.memory_full_info().uss - before < 45e6


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/definitions/missing"}}},
        {"type": "strnig"},
        {"type": "string", "pattern": "(unclosed"},
        {"type": "string", "minLength": 5, "maxLength": 2},
    ],
)
async def test_d08_a_bad_json_schema_crashes_the_engine(app, schema):
    """One request with a schema that cannot be, and the engine is gone. Ours is a 400 that names the field; the next
    request is served."""
    answer = await complete(app, guided_json=schema)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("guided_json")
    good = await complete(app, guided_json={"type": "integer"}, max_tokens=60)
    assert isinstance(json.loads(good.json()["choices"][0]["text"]), int)
    assert app.serving.client.num_restarts == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_d08_whitespace_without_end_where_json_was_asked_for(app):
    """The model writes blanks until max_tokens. Ours may write as much between two values as JSON needs to be read, and
    ends."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    (choice,) = (await complete(app, guided_json=schema, max_tokens=200, temperature=2.0, seed=1)).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["text"])["a"] in (1, 2)


@pytest.mark.asyncio(loop_scope="module")
async def test_d17_the_start_takes_minutes_and_nobody_knows_why(app):
    """Compilation, captures, imports. On a CPU with its own kernels ours compiles nothing and does not even import
    torch; what the start took is a table, phase by phase."""
    client = app.serving.client
    assert list(client.info.phase_seconds) == ["model files", "device", "weights", "KV cache"]
    assert any(line.startswith("Started in") for line in block_lines(client.info, client.settings))
    if client.info.kernels == "native":
        assert "libtorch" not in Path(f"/proc/{client.core_pid}/maps").read_text()


RENAMED = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "time_per_output_token_seconds_bucket": "inter_token_latency_seconds_bucket",
    "gpu_prefix_cache_hits_total": "prefix_cache_hits_total",
    "gpu_prefix_cache_queries_total": "prefix_cache_queries_total",
}


@pytest.mark.asyncio(loop_scope="module")
async def test_d20_metrics_were_renamed_and_the_dashboards_are_blank(app):
    """Ours are there under every name they have had, with the same values, and a dashboard for Grafana comes with it
    that asks for nothing else."""
    await complete(app)
    async with asgi_client(app) as client:
        text = (await client.get("/metrics")).text
    values = {line.rsplit(" ", 1)[0]: line.rsplit(" ", 1)[1] for line in text.splitlines() if line[:1] != "#"}
    names = {name.partition("{")[0] for name in values}
    for old, new in RENAMED.items():
        ours = {name: value for name, value in values.items() if name.startswith(f"vllm:{new}{{")}
        assert ours
        for name, value in ours.items():
            assert values[name.replace(new, old, 1)] == value
    dashboard = (ROOT / "docs/grafana-dashboard.json").read_text()
    expressions = [target["expr"] for panel in json.loads(dashboard)["panels"] for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"(?:vllm|headrace):\w+", text)}
    assert len(expressions) > 10
    assert asked <= names, asked - names


def test_d21_a_flag_was_removed_and_the_unit_file_does_not_start_any_more():
    """`error: unrecognized arguments: --swap-space --disable-log-requests`. Ours takes every flag that guides have ever
    used, says in one line what became of it, and names the nearest where one is misspelt."""
    given = parse_command_line(["m", "--swap-space", "8", "--disable-log-requests", "--num-scheduler-steps", "8"])
    assert not given.errors and not given.refusals()
    assert any("--num-scheduler-steps" in line for line in given.notices())
    with pytest.raises(LaunchError, match="--max-model-len"):
        settings(parse_command_line(["m", "--max-modle-len", "4096"]))


def test_d26_a_cpu_server_ignores_the_container_s_limits_and_crawls(tmp_path, monkeypatch):
    """0.1 tokens a second, because sixty-four threads share two CPUs. Ours counts the CPUs that it may use: by
    affinity, and by the tightest quota of the cgroups around it; no environment variable is needed."""
    group = tmp_path / "cgroup" / "pod"
    group.mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/pod\n")
    monkeypatch.setattr(devices, "CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(devices, "PROCESS_CGROUP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (group / "cpu.max").write_text("200000 100000\n")
    assert devices.available_threads() == 2
    (group / "cpu.max").write_text("max 100000\n")
    assert devices.available_threads() == 64


def test_d27_a_local_gguf_file_is_taken_for_a_repository_or_unsupported_without_a_word(tmp_path, monkeypatch):
    """The path is asked of a hub, or loads and answers garbage. A path of ours is a path; an architecture that it does
    not have is refused with the list of those that it has."""
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ConfigError) as missing:
        resolve_model(str(tmp_path / "missing.gguf"))
    assert "hub" not in str(missing.value)
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "whisper")
    writer.add_tensor("one", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"whisper.*llama.*qwen"):
        open_model(tmp_path / "odd.gguf")


@pytest.mark.parametrize("flags", ["--enable-lora --max-lora-rank 256", "--lora-modules sql=./sql", ""])
def test_d28_an_adapter_loads_on_the_first_request_or_not_at_all_and_slows_everybody(tmp_path, flags):
    """Ranks above `max_lora_rank` fail when somebody asks for them, a large one costs all requests, and the first
    request of an adapter waits for its file. Ours has no adapters yet and says so at the start, flag or folder by name,
    with what gives the same answers today: a merged model, which costs nothing while serving."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 256}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    model = tiny_llama(tmp_path / "model") if flags else tmp_path
    with pytest.raises(LaunchError) as refused:
        load([str(model), *flags.split()])
    said = str(refused.value)
    assert re.search(r"adapter.*not (loaded|built) yet.*merge.*weights \(docs/models.md\)", said, re.DOTALL)
    assert (flags.split() or [str(tmp_path)])[0] in said
    assert "merge_and_unload" in (ROOT / "docs/models.md").read_text()


@pytest.mark.parametrize("flag", ["awq", "fp8", "bitsandbytes"])
def test_d32_a_quantisation_flag_that_does_not_match_is_a_stack_trace(tmp_path, flag):
    """Or worse, garbage. Ours compares the flag with the checkpoint before it reads a weight, and names both."""
    model = tiny_llama(tmp_path)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(LaunchError) as refused:
        load([str(model), "--quantization", flag])
    assert flag in str(refused.value) and "gptq" in str(refused.value)


def test_d35_a_flag_against_hangs_of_all_reduce_must_not_stop_the_start():
    """`--disable-custom-all-reduce` is in every multi-GPU recipe. With one device there is nothing to disable, which is
    what ours says."""
    given = parse_command_line(["m", "--disable-custom-all-reduce", "--tensor-parallel-size", "1"])
    assert not given.errors and not given.refusals()
