"""The engine on an NVIDIA GPU: the same tokens as on the CPU and as transformers, memory that adds up, a server that
serves, and how many tokens a second that makes.

    make test-gpu

Skipped as a whole where torch finds no CUDA device. Made to take under five minutes, start included. What needs no GPU
of the same path is in tests/parity/test_cuda_path.py.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import openai
import pytest

torch = pytest.importorskip("torch")

from headrace.config.model_files import open_model  # noqa: E402
from headrace.config.settings import EngineSettings  # noqa: E402
from headrace.core import EngineCore  # noqa: E402
from tests.engine_runs import request, run, tokens  # noqa: E402
from tests.serving import MODEL_NAME, running_server  # noqa: E402
from tests.small_models import Family, bundled_gguf, write_random_model  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

KV_CACHE_BYTES = 64 << 20
NUM_TOKENS = 24


def engine(
    model: Path, device: Literal["cpu", "cuda"], dtype: Literal["float32", "bfloat16"] = "float32", **changes: object
) -> EngineCore:
    settings = {"dtype": dtype, "max_model_len": 1024, "kv_cache_memory_bytes": KV_CACHE_BYTES, **changes}
    return EngineCore(EngineSettings(model=str(model), device=device, **settings))  # type: ignore[arg-type]


def prompts(vocab_size: int) -> list[list[int]]:
    """Of 1 to 300 tokens: less than a block, whole blocks, several chunks."""
    generator = torch.Generator().manual_seed(11)
    lengths = (1, 15, 16, 17, 64, 300)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def greedy(core: EngineCore, vocab_size: int) -> dict[tuple[str, int], list[int]]:
    return tokens(
        run(
            core,
            [
                request(f"r{i}", ids, max_tokens=NUM_TOKENS, temperature=0.0)
                for i, ids in enumerate(prompts(vocab_size))
            ],
        )
    )


FAMILIES: dict[Family, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 40},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "phi3": {"pad_token_id": 0},
    "gemma3": {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_random_model_equal_transformers(family: Family, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_random_model(tmp_path, family, initializer_range=0.2, **FAMILIES[family])
    ours = greedy(engine(tmp_path, "cuda"), vocab_size=256)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for i, ids in enumerate(prompts(256)):
        with torch.no_grad():
            theirs = oracle.generate(
                torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert ours[f"r{i}", 0] == theirs[0, len(ids) :].tolist(), f"prompt of {len(ids)} tokens"


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_requests_that_are_swapped_out_and_back_give_the_tokens_of_the_cpu(kv_cache_dtype: str, tmp_path: Path) -> None:
    model = write_random_model(tmp_path, "llama", initializer_range=0.2)
    per_token = open_model(model).config.kv_bytes_per_token("float32" if kv_cache_dtype == "auto" else kv_cache_dtype)
    small = {"kv_cache_dtype": kv_cache_dtype, "max_model_len": 400, "kv_cache_memory_bytes": 26 * 16 * per_token}
    core = engine(model, "cuda", swap_space_bytes=64 << 20, **small)
    on_gpu, on_cpu = greedy(core, 256), greedy(engine(model, "cpu", kernels="reference", block_size=16, **small), 256)
    # A last bit can move a number to the next of eight bits, and with it a token.
    assert sum(on_gpu[name] == on_cpu[name] for name in on_cpu) >= len(on_cpu) - (kv_cache_dtype != "auto")
    assert core._scheduler.stats(0.0).host_saved_total > 0


def test_sleep_gives_the_memory_back_and_waking_up_takes_it_again() -> None:
    core = engine(bundled_gguf(), "cuda", kv_cache_memory_bytes=1 << 30)
    expected = greedy(core, 40_000)
    awake, _ = torch.cuda.mem_get_info()
    core.release_kv_cache()
    asleep, _ = torch.cuda.mem_get_info()
    assert asleep - awake > 0.9 * core.info.kv_cache_bytes
    core.restore_kv_cache()
    assert greedy(core, 40_000) == expected


def test_memory_is_measured_and_used_up_to_the_utilization() -> None:
    free, total = torch.cuda.mem_get_info()
    share = round(1 - free / total + 0.2, 3)
    core = engine(bundled_gguf(), "cuda", "bfloat16", kv_cache_memory_bytes=None, gpu_memory_utilization=share)
    wide = [
        request(f"r{i}", [7 * i % 900 + 3] * 8, max_tokens=4, top_p=0.9, seed=i, logprobs=20, logit_bias={5: 1.0})
        for i in range(core.info.max_num_seqs)
    ]
    run(core, wide)
    left, _ = torch.cuda.mem_get_info()
    assert share - 0.05 < 1 - left / total <= share + 0.01


def test_the_bundled_model_gives_the_same_tokens_on_gpu_and_cpu() -> None:
    on_gpu = greedy(engine(bundled_gguf(), "cuda"), vocab_size=40_000)
    on_cpu = greedy(engine(bundled_gguf(), "cpu"), vocab_size=40_000)
    assert on_gpu == on_cpu


def test_seeded_sampling_in_bfloat16_is_the_same_twice() -> None:
    core = engine(bundled_gguf(), "cuda", "bfloat16")
    requests = [
        request(f"r{i}", ids, max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.9, seed=i)
        for i, ids in enumerate(prompts(40_000))
    ]
    assert tokens(run(core, requests)) == tokens(run(core, requests))


def test_how_many_tokens_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    """A figure to look at, without a bound."""
    core = engine(bundled_gguf(), "cuda", "bfloat16")
    for batch in (1, 32):
        asked = [request(f"{batch}-{i}", [i + 3] * 64, max_tokens=64, seed=i, temperature=0.0) for i in range(batch)]
        began = time.perf_counter()
        generated = sum(map(len, tokens(run(core, asked)).values()))
        with capsys.disabled():
            rate = generated / (time.perf_counter() - began)
            print(f"\n{core.info.instruction_set}: {rate:,.0f} generated tokens/s with {batch} at once, prompts of 64")


def test_a_server_on_the_gpu_answers_and_streams(tmp_path: Path) -> None:
    with running_server(
        tmp_path / "server.log", ["--device", "cuda", "--max-model-len", "2048"], limit_memory=False
    ) as up:
        client = openai.OpenAI(base_url=up.base_url, api_key="unused", max_retries=0)
        ask = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": "What turns a water wheel?"}],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**ask)
        pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**ask, stream=True)]
        assert len(whole.choices[0].message.content) > 20
        assert "".join(pieces) == whole.choices[0].message.content
