"""The engine on an NVIDIA GPU: the same tokens as on the CPU and as transformers, and a server that serves.

    make test-gpu

Skipped as a whole where torch finds no CUDA device. Made to take under five minutes, start included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import openai
import pytest

torch = pytest.importorskip("torch")

from headrace.config.settings import EngineSettings  # noqa: E402
from headrace.core import EngineCore  # noqa: E402
from tests.engine_runs import request, run, tokens  # noqa: E402
from tests.serving import MODEL_NAME, running_server  # noqa: E402
from tests.small_models import bundled_gguf, write_random_model  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

KV_CACHE_BYTES = 64 << 20
NUM_TOKENS = 24


def engine(
    model: Path, device: Literal["cpu", "cuda"], dtype: Literal["float32", "bfloat16"] = "float32"
) -> EngineCore:
    return EngineCore(
        EngineSettings(
            model=str(model), device=device, dtype=dtype, max_model_len=1024, kv_cache_memory_bytes=KV_CACHE_BYTES
        )
    )


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


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_greedy_tokens_of_a_random_model_equal_transformers(family: Literal["llama", "qwen2"], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_random_model(tmp_path, family)
    ours = greedy(engine(tmp_path, "cuda"), vocab_size=256)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for i, ids in enumerate(prompts(256)):
        with torch.no_grad():
            theirs = oracle.generate(
                torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert ours[f"r{i}", 0] == theirs[0, len(ids) :].tolist(), f"prompt of {len(ids)} tokens"


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
