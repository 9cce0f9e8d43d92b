"""The same answer every time: a request gives the same tokens alone or in a batch, whole or chunked, cold or
cached, preempted or not, forked or not. On the bundled model in float32, greedy and seeded, token by token."""

from __future__ import annotations

import pytest

from headrace.config.resolve import resolve_model
from headrace.config.settings import EngineSettings
from headrace.core import EngineCore
from headrace.protocol.ipc import AddRequest
from tests.engine_runs import Sequence, request, run, tokens

pytestmark = pytest.mark.timeout(600)

NUM_REQUESTS = 16
NUM_TOKENS = 6
BLOCK_SIZE = 8
TOKEN_BYTES = 46_080


def engine(**changes: object) -> EngineCore:
    settings: dict[str, object] = {
        "model": str(resolve_model(None)),
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 4000 * TOKEN_BYTES,
        "enable_prefix_caching": False,
    }
    return EngineCore(EngineSettings(**(settings | changes)))  # type: ignore[arg-type]


def prompt(i: int) -> list[int]:
    """5 to 120 tokens; every other one starts with the same 40."""
    shared = [(17 * j + 5) % 40_000 + 500 for j in range(40)]
    own = [(31 * i + 7 * j * j + 11) % 40_000 + 500 for j in range(5 + 5 * i)]
    return shared + own if i % 2 else own


def requests() -> list[AddRequest]:
    """Half of them greedy; the others drawn, each with other limits and its own seed."""
    drawn = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.1},
        {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    ]
    return [
        request(
            f"r{i}",
            prompt(i),
            max_tokens=NUM_TOKENS,
            seed=1000 + i,
            **({"temperature": 0.0} if i % 2 == 0 else drawn[i // 2 % len(drawn)]),
        )
        for i in range(NUM_REQUESTS)
    ]


@pytest.fixture(scope="module")
def plain() -> EngineCore:
    return engine()


@pytest.fixture(scope="module")
def alone(plain: EngineCore) -> dict[tuple[str, int], list[int]]:
    """Every request by itself in an empty engine: what all other ways must give."""
    results: dict[tuple[str, int], list[int]] = {}
    for r in requests():
        results |= tokens(run(plain, [r]))
    assert all(len(t) == NUM_TOKENS for t in results.values())
    assert len({tuple(t) for t in results.values()}) == NUM_REQUESTS, "the requests are too alike to test anything"
    return results


def test_a_batch_of_16_gives_the_tokens_of_16_single_runs(plain: EngineCore, alone: dict) -> None:
    assert tokens(run(plain, requests())) == alone


def test_chunks_of_7_tokens_give_the_same_tokens_as_whole_prompts(alone: dict) -> None:
    core = engine(max_num_batched_tokens=7, max_num_seqs=4)
    short = {f"r{i}" for i in range(6)}
    results = tokens(run(core, [r for r in requests() if r.request_id in short]))
    assert results == {key: value for key, value in alone.items() if key[0] in short}


def test_whole_prompts_without_chunking_give_the_same_tokens(alone: dict) -> None:
    core = engine(enable_chunked_prefill=False, max_num_batched_tokens=1024)
    assert tokens(run(core, requests())) == alone


def test_cached_prefixes_give_the_same_tokens_as_cold_ones(alone: dict) -> None:
    core = engine(enable_prefix_caching=True)
    cold = run(core, requests())
    assert tokens(cold) == alone
    warm = run(core, requests())
    assert tokens(warm) == alone
    long_enough = [s for (rid, _), s in warm.items() if len(prompt(int(rid[1:]))) > BLOCK_SIZE]
    assert long_enough and all(s.num_cached_tokens >= BLOCK_SIZE for s in long_enough)


def preempted(sequences: dict[tuple[str, int], Sequence]) -> int:
    return sum(s.num_preemptions for s in sequences.values())


def test_preemption_gives_the_same_tokens(alone: dict) -> None:
    core = engine(
        block_size=1,
        kv_cache_memory_bytes=150 * TOKEN_BYTES,
        max_model_len=150,
    )
    short_first = sorted(requests(), key=lambda r: len(r.token_ids))
    sequences = run(core, short_first)
    assert tokens(sequences) == alone
    assert preempted(sequences) >= 1, "the cache was not small enough to test anything"


def test_n_forks_give_the_tokens_of_n_single_sequences(plain: EngineCore) -> None:
    """Fork i draws as sequence i, whether its siblings run beside it or not; forks of a greedy request are equal."""
    drawn = request("n", prompt(3), max_tokens=8, temperature=0.9, seed=5, n=4)
    together = tokens(run(plain, [drawn]))
    assert len({tuple(t) for t in together.values()}) > 1, "forks all drew the same tokens"
    cached = engine(enable_prefix_caching=True)
    small = engine(block_size=1, kv_cache_memory_bytes=90 * TOKEN_BYTES, max_model_len=90)
    assert tokens(run(cached, [drawn])) == together
    squeezed = run(small, [drawn])
    assert tokens(squeezed) == together
    single = tokens(run(plain, [request("n", prompt(3), max_tokens=8, temperature=0.9, seed=5, n=1)]))
    assert single["n", 0] == together["n", 0]
    greedy = tokens(run(plain, [request("g", prompt(3), max_tokens=8, temperature=0.0, n=3)]))
    assert greedy["g", 0] == greedy["g", 1] == greedy["g", 2]
