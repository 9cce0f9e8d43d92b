"""--kv-cache-dtype: with every type the same answer for every schedule, and nearly that of an exact cache."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.config.model_files import open_model  # noqa: E402
from headrace.config.settings import EngineSettings  # noqa: E402
from headrace.core import EngineCore  # noqa: E402
from headrace.protocol.ipc import AddRequest  # noqa: E402
from headrace.text.tokenizer import Tokenizer  # noqa: E402
from tests.engine_runs import Sequence, request, run  # noqa: E402
from tests.small_models import bundled_gguf  # noqa: E402
from tests.tiny_models import tiny_llama  # noqa: E402

try:
    from headrace.kernels.native import library

    library.load()
    KERNELS = ["reference", "native"]
except ImportError:
    KERNELS = ["reference"]

EIGHT_BITS = ["fp8_e4m3", "fp8_e5m2", "int8"]
CACHE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def engine(model: Path, kernels: str, kv_cache_dtype: str, **changes: object) -> EngineCore:
    settings = {
        "model": str(model), "dtype": "float32", "kernels": kernels, "kv_cache_dtype": kv_cache_dtype, "device": "cpu",
        "block_size": 16, "max_num_seqs": 16, "kv_cache_memory_bytes": CACHE_BYTES, "max_model_len": 160, "threads": 2,
    } | changes  # fmt: skip
    return EngineCore(EngineSettings(**settings))  # type: ignore[arg-type]


def requests() -> list[AddRequest]:
    rng = random.Random(1)
    shared = [rng.randrange(3, 250) for _ in range(40)]
    return [
        request(
            f"r{i}",
            shared[: 20 * (i % 3)] + [rng.randrange(3, 250) for _ in range(rng.randint(10, 60))],
            max_tokens=24,
            logprobs=2,
            prompt_logprobs=0 if i % 2 else None,
        )
        for i in range(6)
    ]


def answers(sequences: dict[tuple[str, int], Sequence]) -> dict[tuple[str, int], object]:
    return {key: (s.token_ids, s.logprobs, s.prompt_logprobs) for key, s in sequences.items()}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kv_cache_dtype", [*EIGHT_BITS, "bfloat16"])
def test_alone_together_in_chunks_cached_and_preempted_an_answer_is_the_same(
    model: Path, kernels: str, kv_cache_dtype: str
) -> None:
    core = engine(model, kernels, kv_cache_dtype, enable_prefix_caching=False)
    alone = {}
    for r in requests():
        alone |= answers(run(core, [r]))
    per_token = core.info.kv_cache_bytes // (core.info.num_blocks * core.info.block_size)
    core = engine(model, kernels, kv_cache_dtype, kv_cache_memory_bytes=176 * per_token)
    sequences = run(core, requests())
    assert answers(sequences) == alone
    assert any(s.num_preemptions for s in sequences.values()), "the cache holds one or two of them at once"
    core = engine(model, kernels, kv_cache_dtype, block_size=8, max_num_batched_tokens=11, max_num_seqs=4)
    for _ in range(2):
        sequences = run(core, requests())
        assert answers(sequences) == alone
    assert any(s.num_cached_tokens for s in sequences.values()), "the second time prefixes are cached"


def prompt_logprobs(core: EngineCore) -> np.ndarray:
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 250) for _ in range(150)] for _ in range(4)]
    sequences = run(core, [request(str(i), p, max_tokens=1, prompt_logprobs=0) for i, p in enumerate(prompts)])
    return np.array([position.logprob for s in sequences.values() for position in s.prompt_logprobs])


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_are_close_to_those_of_an_exact_cache(model: Path, kernels: str) -> None:
    """As close as so random a model lets them be: its log-probabilities lie around -9, uniform ones at -5.7."""
    exact = prompt_logprobs(engine(model, kernels, "float32"))
    # int8 keeps 7 bits below a head's largest value, e4m3 3 bits and e5m2 2 bits of every value.
    for kv_cache_dtype, most in (("bfloat16", 0.04), ("int8", 0.1), ("fp8_e4m3", 0.5), ("fp8_e5m2", 0.9)):
        difference = prompt_logprobs(engine(model, kernels, kv_cache_dtype)) - exact
        assert 0 < np.abs(difference).mean() < most, kv_cache_dtype


@pytest.mark.skipif("native" not in KERNELS, reason="the reference kernels would take minutes")
def test_what_eight_bits_cost_a_real_model_is_what_the_documentation_says() -> None:
    """Perplexity of 256 tokens of English, computed in float32 but for the cache."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = Tokenizer.load(open_model(bundled_gguf())).encode(text, add_special_tokens=False)[:256]
    means = {}
    for kv_cache_dtype in ("float32", *EIGHT_BITS):
        core = EngineCore(
            EngineSettings(
                model=str(bundled_gguf()), dtype="float32", kernels="native", kv_cache_dtype=kv_cache_dtype,
                device="cpu", threads=2, max_model_len=512, kv_cache_memory_bytes=64 << 20,
            )
        )  # fmt: skip
        (sequence,) = run(core, [request("text", token_ids, max_tokens=1, prompt_logprobs=0)]).values()
        means[kv_cache_dtype] = np.mean([position.logprob for position in sequence.prompt_logprobs])
    for kv_cache_dtype, most in (("int8", 0.01), ("fp8_e4m3", 0.03), ("fp8_e5m2", 0.1)):
        assert np.exp(means["float32"] - means[kv_cache_dtype]) < 1 + most, (kv_cache_dtype, means)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_same_memory_holds_more_tokens_and_the_engine_says_of_which_type(model: Path, kernels: str) -> None:
    exact = engine(model, kernels, "auto").info
    assert exact.kv_cache_dtype == "float32"
    for asked, named in (("fp8", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2"), ("int8", "int8")):
        info = engine(model, kernels, asked).info
        assert info.kv_cache_dtype == named
        head_dim = 16
        assert info.num_blocks == CACHE_BYTES * exact.num_blocks * 4 * head_dim // (
            exact.kv_cache_bytes * (head_dim + 4)
        )
