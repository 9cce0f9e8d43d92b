"""`--device cuda` without a GPU: every tensor of a step is where a GPU needs it, and memory is measured and given back.

tests/pretend_cuda.py stands for the GPU. Answers must be those of the CPU, so a tensor that is lost on the way shows
too; tests/gpu holds what a real GPU is needed for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("transformers")

import torch

from headrace.config.errors import ConfigError
from headrace.config.settings import EngineSettings
from headrace.core import EngineCore
from headrace.kernels.reference import ReferenceKernels
from headrace.protocol.ipc import AddRequest, GrammarSpec
from headrace.runtime.devices import DeviceLost
from tests.encoder_models import write_pooling, write_random_encoder
from tests.engine_runs import request, run, tokens
from tests.parity import test_other_families
from tests.parity.test_same_tokens_families import SMALL
from tests.parity.test_same_tokens_tiny import engine, requests
from tests.pretend_cuda import Memory, PretendCuda, pretend_cuda
from tests.small_models import Family, write_random_model
from tests.tiny_models import tiny_llama
from tests.vector_runs import pooling_core, vectors


def with_fewer_tokens(asked: AddRequest, max_tokens: int) -> AddRequest:
    return msgspec.structs.replace(asked, params=msgspec.structs.replace(asked.params, max_tokens=max_tokens))


REQUESTS = [
    *(with_fewer_tokens(r, 6) for r in requests()[::2] + requests()[1::6]),
    request("json", [7, 9], max_tokens=9, grammar=GrammarSpec(kind="regex", text="[ab]{3}[0-9]{4}")),
]
"""Of every kind of sampling, with several answers, log-probabilities, prompts to score, a mask."""
CROWDED = {"max_model_len": 80, "max_num_batched_tokens": 24, "swap_space_bytes": 1 << 24, "kernels": "reference"}
"""With a cache of one request's size: somebody is swapped out all the time."""

MODELS: dict[str, tuple[Family, dict[str, object], dict[str, object]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
    "biases": ("qwen2", {}, {"kv_cache_dtype": "fp8_e4m3"}),
    "int8 weights": ("qwen3", {}, {"quantization": "int8"}),
    "windows": ("gemma3", {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}, {}),
    "experts": ("mixtral", {"num_local_experts": 4}, {"kv_cache_dtype": "int8"}),
    "fused": ("phi3", {"pad_token_id": 0}, {"kv_cache_dtype": "fp8_e5m2"}),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    with pretend_cuda(monkeypatch) as memory:
        yield memory


@pytest.mark.parametrize("kind", MODELS)
def test_every_tensor_of_a_step_is_on_the_gpu_and_gives_the_tokens_of_the_cpu(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    family, overrides, settings = MODELS[kind]
    model = write_random_model(tmp_path, family, **SMALL | overrides)
    asked = REQUESTS if kind == "tied" else REQUESTS[:3]
    num_tokens = 32 if "kv_cache_dtype" in settings else 80
    expected = tokens(run(engine(model, num_tokens, **CROWDED | settings), asked))
    with pretend_cuda(monkeypatch):
        core = engine(model, num_tokens, device="cuda", **CROWDED | settings)
        assert (core.info.device, core.info.instruction_set) == ("cuda", "Pretended GPU (compute capability 9.0)")
        assert tokens(run(core, asked)) == expected
    assert kind != "tied" or core._scheduler.stats(0.0).host_loaded_total
    assert not [r.message for r in caplog.records if r.exc_info], "a move to the host that fails would be made up for"


def test_a_tensor_that_is_left_on_the_host_is_an_error(gpu: Memory) -> None:
    on_gpu, on_host = torch.ones(3, device="cuda"), torch.ones(3)
    assert isinstance(on_gpu, PretendCuda) and isinstance(on_host.to("cuda"), PretendCuda)
    for mixed in (
        lambda: on_gpu + on_host,
        lambda: on_host[on_gpu.long()],
        lambda: on_gpu.index_select(0, on_host.long()),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        on_gpu.numpy()
    assert (on_gpu * torch.tensor(2.0)).cpu().tolist() == [2.0, 2.0, 2.0], "a lone number may come from the host"


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaForSequenceClassification"])
def test_encoders_give_the_vectors_of_the_cpu(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_random_encoder(tmp_path, architecture, **({"num_labels": 1} if "For" in architecture else {}))
    write_pooling(path, "mean_tokens")
    texts = [[2, 40, 41, 3], list(range(5, 60)), [2, 3]]
    expected = vectors(pooling_core(path, "--kernels", "reference"), texts)
    with pretend_cuda(monkeypatch):
        got = vectors(pooling_core(path, "--device", "cuda"), texts)
    assert all(abs(a - b).max() < 1e-6 for a, b in zip(got, expected, strict=True))


def test_a_family_in_transformers_code_gives_the_tokens_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = test_other_families.write(tmp_path, "Olmo2")
    asked = [request(f"r{i}", [i + 1] * (5 + 9 * i), max_tokens=8, seed=i) for i in range(4)]
    expected = tokens(run(test_other_families.load(model), asked))
    with pretend_cuda(monkeypatch):
        core = test_other_families.load(model, device="cuda")
        assert (core.info.device, tokens(run(core, asked))) == ("cuda", expected)


def test_sleep_gives_the_gpu_s_memory_back_and_waking_up_takes_it_again(tmp_path: Path, gpu: Memory) -> None:
    core = engine(tiny_llama(tmp_path), 4096, device="cuda")
    asked = [request("r", [5, 6, 7], max_tokens=6, seed=1)]
    expected, awake = tokens(run(core, asked)), gpu.held
    assert core.release_kv_cache() == core.info.kv_cache_bytes
    assert gpu.held <= awake - core.info.kv_cache_bytes
    core.restore_kv_cache()
    assert (tokens(run(core, asked)), gpu.held) == (expected, awake)


def settings(model: Path, **changes: object) -> EngineSettings:
    values = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 256, "swap_space_bytes": 0} | changes
    return EngineSettings(model=str(model), device="cuda", **values)


@pytest.mark.parametrize("taken", [0, 20 << 20])
def test_the_kv_cache_gets_what_others_the_weights_and_the_widest_step_leave(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 120 << 20
    with pretend_cuda(monkeypatch, Memory(limit=limit, taken=taken)) as memory:
        core = EngineCore(settings(tiny_llama(tmp_path)))
        asked = [
            request(f"r{i}", [i + 1] * 32, max_tokens=4, logprobs=20, top_p=0.9, prompt_logprobs=5, logit_bias={3: 0.5})
            for i in range(8)
        ]
        run(core, asked)
        used = memory.reserved + taken
    assert 0.88 * limit < used < 0.9 * limit, f"gpu_memory_utilization 0.9: {used / limit:.3f}"


def test_vectors_on_a_gpu_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pooling(write_random_encoder(tmp_path), "mean_tokens")
    with pretend_cuda(monkeypatch, Memory(limit=1 << 20)), pytest.raises(ConfigError, match="more than the"):
        pooling_core(path, "--device", "cuda")


def test_a_gpu_that_gives_less_than_it_said_gets_a_smaller_kv_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_cuda(monkeypatch, Memory(limit=120 << 20)) as memory:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (memory.limit, memory.limit))
        memory.taken = 50 << 20
        core = EngineCore(settings(tiny_llama(tmp_path)))
        assert "could not be allocated" in core.info.notes[0]
        assert len(run(core, [request("r", [5, 6, 7], max_tokens=6)])["r", 0].token_ids) == 6


def test_a_step_that_finds_no_memory_is_done_in_halves(tmp_path: Path, gpu: Memory) -> None:
    core = engine(tiny_llama(tmp_path, max_positions=512), 4096, device="cuda", max_num_batched_tokens=512)
    asked = [request(f"r{i}", [(7 * i + j) % 250 for j in range(60)], max_tokens=4, seed=i) for i in range(8)]
    expected = tokens(run(core, asked))
    core.reset_prefix_cache()
    before, most = gpu.held, gpu.reserved
    gpu.limit = before + 2 * (most - before) // 3
    assert tokens(run(core, asked)) == expected
    gpu.limit = before
    failed = run(core, [request("none", [1, 2, 3], max_tokens=4)])["none", 0]
    assert failed.finish_reason == "error" and "CUDA out of memory" in (failed.error or "")
    gpu.limit = 8 << 30
    assert tokens(run(core, asked)) == expected


def test_a_gpu_without_bfloat16_gets_float16_or_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_random_model(tmp_path, "llama", dtype="bfloat16", **SMALL)
    with pretend_cuda(monkeypatch, bfloat16=False):
        assert EngineCore(settings(model, dtype="auto")).info.dtype == "float16"
        with pytest.raises(ConfigError, match="Pretended GPU has no bfloat16: use --dtype float16"):
            EngineCore(settings(model, dtype="bfloat16"))
    with pretend_cuda(monkeypatch):
        assert EngineCore(settings(model, dtype="auto")).info.dtype == "bfloat16"


@pytest.mark.parametrize("lost", [False, True])
def test_a_gpu_that_fails_for_good_ends_the_core_and_is_nobody_s_fault(
    lost: bool, tmp_path: Path, gpu: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An access out of bounds makes every later call fail: requests would be failed one by one for ever."""
    core = engine(tiny_llama(tmp_path), 4096, device="cuda")
    asked = request("r", [1, 2, 3], max_tokens=4)
    with monkeypatch.context() as broken:

        def fail(*arguments: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        broken.setattr(ReferenceKernels, "load_batch", fail)
        if lost:
            broken.setattr(torch.cuda, "synchronize", fail)
            with pytest.raises(DeviceLost, match="illegal memory access"):
                run(core, [asked])
            return
        assert run(core, [asked])["r", 0].finish_reason == "error"
    assert run(core, [asked])["r", 0].finish_reason == "length"
