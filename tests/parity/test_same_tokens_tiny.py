"""The same answer every time, on a tiny random model, where a thousand steps cost a second: constant preemption,
every scheduler variation against every other, streams of arrivals."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.config.model_files import open_model
from headrace.config.settings import EngineSettings
from headrace.core import EngineCore
from headrace.protocol.ipc import AddRequest, RepetitionDetection
from tests.engine_runs import Sequence, collect, request, run
from tests.tiny_models import tiny_llama

NUM_REQUESTS = 16
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def engine(model: Path, num_tokens: int = 4096, block_size: int = 4, **changes: object) -> EngineCore:
    probe = {"model": str(model), "dtype": "float32", "block_size": block_size, "max_num_seqs": 16} | changes
    config = open_model(model).config
    per_token = config.kv_bytes_per_token("float32") * len(config.layer_groups)
    probe.setdefault("kv_cache_memory_bytes", num_tokens * per_token)
    probe.setdefault("max_model_len", min(num_tokens, 256))
    return EngineCore(EngineSettings(**probe))  # type: ignore[arg-type]


ASKED: list[dict[str, object]] = [
    {},
    {"allowed_token_ids": tuple(range(3, 300, 7))},
    {"bad_words": ((11,), (4, 9), *((a, b) for a in range(0, 300, 9) for b in range(0, 300, 7)))},
    {"prompt_logprobs": 2, "logprobs": 3},
    {"logprobs": 0, "logprob_token_ids": (7, 3)},
    {"repetition_detection": RepetitionDetection(4, 1, 2)},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 5, "stop_token_ids": (8, 20, 21, 22)},
    {"logit_bias": {5: 2.5, 9: -3.0}, "prompt_logprobs": 0},
]
"""What a request asks besides, by turns; every answer of it must be the same too."""


def requests(seed: int = 1) -> list[AddRequest]:
    """Half greedy, half drawn; prompts of 1 to 50 tokens of which many share a beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 250) for _ in range(24)]
    made = []
    for i in range(NUM_REQUESTS):
        token_ids = [rng.randrange(3, 250) for _ in range(rng.randint(1, 26))]
        if i % 3 == 0:
            token_ids = shared + token_ids
        sampling = {"temperature": 0.0} if i % 2 else {"temperature": 1.0, "top_p": 0.95, "seed": i, "n": 1 + i % 3}
        made.append(request(f"r{i}", token_ids, max_tokens=NUM_TOKENS, **sampling, **ASKED[i // 2 % len(ASKED)]))
    return made


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[tuple[str, int], list[int]]:
    core = engine(model, enable_prefix_caching=False)
    results: dict[tuple[str, int], list[int]] = {}
    for r in requests():
        results |= answers(run(core, [r]))
    return results


def answers(sequences: dict[tuple[str, int], Sequence]) -> dict[tuple[str, int], object]:
    """Everything a client is told: tokens, why they end, log-probabilities of both kinds, bit for bit."""
    return {key: (s.token_ids, s.finish_reason, s.logprobs, s.prompt_logprobs) for key, s in sequences.items()}


def test_the_requests_of_this_file_use_what_they_ask_for(alone: dict) -> None:
    """Otherwise equal answers would show nothing."""
    by_id = {r.request_id: r for r in requests()}
    assert "repetition" in {reason for _, reason, _, _ in alone.values()}
    for (name, index), (token_ids, _, logprobs, prompt_logprobs) in alone.items():
        params, prompt = by_id[name].params, by_id[name].token_ids
        if params.allowed_token_ids is not None:
            assert set(token_ids) <= set(params.allowed_token_ids)
        for word in params.bad_words:
            assert word not in zip(*(token_ids[k:] for k in range(len(word))), strict=False)
        assert len(logprobs) == (len(token_ids) if params.logprobs is not None else 0)
        assert len(prompt_logprobs) == (len(prompt) - 1 if params.prompt_logprobs is not None and index == 0 else 0)


VARIATIONS = {
    "together": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks of 5": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    "blocks of 1": {"block_size": 1},
    "blocks of 32": {"block_size": 32},
    "a step-time target nobody can meet": {"step_time_target_s": 1e-6},
    "two at a time": {"max_num_seqs": 2},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_every_way_of_scheduling_gives_the_same_tokens(model: Path, alone: dict, name: str) -> None:
    core = engine(model, **VARIATIONS[name])
    assert answers(run(core, requests())) == alone
    assert answers(run(core, requests())) == alone, "the second time, when prefixes are cached"


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_constant_preemption_gives_the_same_tokens(
    model: Path, alone: dict, block_size: int, prefix_caching: bool
) -> None:
    core = engine(
        model, 80, block_size, enable_prefix_caching=prefix_caching, max_model_len=80, max_num_batched_tokens=64
    )
    sequences = run(core, requests())
    assert answers(sequences) == alone
    assert sum(s.num_preemptions for s in sequences.values()) >= NUM_REQUESTS


def test_arrivals_in_the_middle_change_nothing_for_anybody(model: Path, alone: dict) -> None:
    """Requests come one by one while others run; every third is aborted half way and must not disturb the rest."""
    core = engine(model, 400)
    rng = random.Random(3)
    sequences: dict[tuple[str, int], Sequence] = {}
    waiting = requests()
    aborted = {r.request_id for i, r in enumerate(waiting) if i % 3 == 2}
    steps = 0
    while waiting or core.has_work:
        if waiting and (rng.random() < 0.3 or not core.has_work):
            assert core.add(waiting.pop(0)) is None
        output = core.step()
        if output is not None:
            collect(output.outputs, sequences)
        steps += 1
        if steps % 7 == 0:
            for rid in aborted:
                if any(key[0] == rid and len(s.token_ids) >= 5 for key, s in sequences.items()):
                    core.abort(rid)
        assert steps < 20_000
    core.check_integrity()
    finished = {key: answer for key, answer in answers(sequences).items() if key[0] not in aborted}
    assert finished == {key: value for key, value in alone.items() if key[0] not in aborted}
    for key, sequence in sequences.items():
        assert alone[key][0][: len(sequence.token_ids)] == sequence.token_ids
