"""What people suffer with inference servers, part 1: memory, the scheduler, isolation and numbers.

Each test is one pain that users of other servers have reported again and again, and what Headrace does instead. The
engine is a real one in this process with a tiny random model.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from headrace.config.errors import ConfigError
from headrace.config.settings import EngineSettings
from headrace.core import EngineCore
from headrace.engine.request import Request, Sequence
from headrace.engine.scheduler import Scheduler, SchedulerSettings
from headrace.protocol.ipc import AddRequest
from headrace.runtime.runner import Runner
from tests.engine_runs import request, run, tokens
from tests.tiny_models import tiny_llama

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Of the tiny model's KV cache in float32: two layers, keys and values, two heads of 16."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def load(model: Path, *, cache_tokens: int = 4096, **changes) -> EngineCore:
    values = {"dtype": "float32", "threads": 1, "block_size": 16, "kv_cache_memory_bytes": cache_tokens * TOKEN_BYTES}
    return EngineCore(EngineSettings(model=str(model), **{**values, **changes}))


@pytest.fixture(scope="module")
def core(model) -> EngineCore:
    return load(model)


def test_d01_out_of_memory_at_the_start_although_the_flag_says_90_percent(model, monkeypatch):
    """The estimate was wrong, or another process took the memory: the server exits. Ours tries a smaller KV cache,
    serves with what there is, and says so."""
    real = Runner.allocate_kv_cache

    def scarce(self, num_blocks: int, *rest):
        if num_blocks > 100:
            raise MemoryError
        return real(self, num_blocks, *rest)

    monkeypatch.setattr(Runner, "allocate_kv_cache", scarce)
    core = load(model)
    assert 50 < core.info.num_blocks <= 100
    assert any("could not be allocated" in note for note in core.info.notes)
    assert len(tokens(run(core, [request("r", [1, 2, 3], max_tokens=8, temperature=0.0)]))[("r", 0)]) == 8


def test_d02_max_seq_len_is_larger_than_the_kv_cache_and_the_server_exits(model):
    """Nobody asked for the model's longest text. Without --max-model-len ours takes what fits and says so; with it,
    one message holds a value that works."""
    fitted = load(model, cache_tokens=160)
    assert fitted.info.max_model_len == 160
    assert any("160" in note for note in fitted.info.notes)
    with pytest.raises(ConfigError) as refused:
        load(model, cache_tokens=160, max_model_len=512)
    advice = re.search(r"--kv-cache-memory-bytes (\d+)", str(refused.value))
    assert advice is not None
    assert load(model, kv_cache_memory_bytes=int(advice[1]), max_model_len=512).info.max_model_len == 512


def test_d03_a_request_larger_than_the_kv_cache_blocks_the_queue_for_ever():
    """One request that waits, none that runs, and everything behind it starves. Ours is refused when it comes, with
    both numbers; what is behind it is served."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 400, "num_blocks": 8, "block_size": 16}
    scheduler = Scheduler(SchedulerSettings(**sizes))
    refusal = scheduler.add(request("large", list(range(1, 200)), max_tokens=100))
    assert refusal is not None and refusal.code == "kv_cache_too_small"
    assert re.findall(r"\d+", refusal.message)[:1] and "128" in refusal.message
    assert scheduler.add(request("small", [1, 2, 3], max_tokens=4)) is None
    assert scheduler.schedule() is not None


def test_d05_one_long_prompt_stalls_everybody_s_answers(model):
    """Three to seven minutes without a token while somebody else's prompt is read. Ours reads it in pieces, and every
    piece comes with the next token of the answers that run."""
    core = load(model, max_num_batched_tokens=32)
    core.add(request("answer", [1, 2, 3], max_tokens=100, temperature=0.0))
    while not any(output.token_ids for output in core.step().outputs):
        continue
    core.add(request("long", [i % 200 for i in range(400)], max_tokens=2, temperature=0.0))
    pieces, answered = 0, 0
    while True:
        outputs = core.step().outputs
        pieces += 1
        answered += sum(output.request_id == "answer" for output in outputs)
        if any(output.request_id == "long" for output in outputs):
            break
    assert pieces >= 400 // 32
    assert answered == pieces


def test_d06_memory_grows_for_days_until_it_crashes_at_night(core):
    """A list that nobody empties. Of a thousand finished, aborted and refused requests nothing is left in ours."""
    names = [f"r{i}" for i in range(200)]
    for name in names[:40]:
        core.add(request(name, [1, 2, 3], max_tokens=400))
    core.step()
    for name in names[:40]:
        core.abort(name)
    assert core.add(request("refused", [1] * 600, max_tokens=4)) is not None
    run(core, [request(name, [1, 2, i], max_tokens=2, n=1 + i % 2) for i, name in enumerate(names)])
    gc.collect()
    left = Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in (Request, Sequence))
    assert not left
    assert core._runner.num_sequences == 0


def test_d07_one_request_s_out_of_memory_kills_the_engine_for_everybody(core, monkeypatch):
    """A prompt_logprobs on a long text, and every user's answer is gone. Ours does the step again in halves until the
    guilty one is alone: that one gets an error, the others every token."""
    others = [request(f"other{i}", [4, 5, i], max_tokens=6, temperature=0.0) for i in range(4)]
    expected = tokens(run(core, others))
    real = Runner._compute

    def compute(self, steps):
        if any(self._table.tokens[self._table.row(step.seq_id), 0] == 99 for step in steps):
            raise MemoryError("tried to allocate 900 GiB")
        return real(self, steps)

    monkeypatch.setattr(Runner, "_compute", compute)
    together = run(core, [*others, request("guilty", [99, 1, 2], max_tokens=6)])
    guilty = together.pop(("guilty", 0))
    assert guilty.finish_reason == "error" and "900 GiB" in guilty.error
    assert tokens(together) == expected


def test_d18_the_same_request_answers_differently_every_time(core):
    """Temperature 0 changes with the load, a seed is ignored. Ours gives the same tokens alone, in a batch of sixteen
    and again, greedy or seeded."""
    asked = {
        "greedy": {"max_tokens": 12, "temperature": 0.0},
        "seeded": {"max_tokens": 12, "temperature": 1.0, "seed": 7, "top_p": 0.9},
    }
    alone = {name: run(core, [request(name, [5, 6, 7], **how)])[(name, 0)].token_ids for name, how in asked.items()}
    crowd = [request(f"c{i}", [i + 1] * (3 + i), max_tokens=20, seed=i) for i in range(14)]
    for _ in range(2):
        together = run(core, [*crowd, *(request(name, [5, 6, 7], **how) for name, how in asked.items())])
        assert {name: together[(name, 0)].token_ids for name in asked} == alone


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_d23_an_fp8_kv_cache_is_refused_or_crashes_on_older_hardware(model, kv_cache_dtype):
    """The error "fp8e4nv not supported in this architecture". Storage and arithmetic are two things in ours: any
    machine keeps numbers in eight bits and computes in its own."""
    core = load(model, kv_cache_dtype=kv_cache_dtype)
    assert core.info.kv_cache_dtype.startswith(kv_cache_dtype[:3])
    assert len(tokens(run(core, [request("r", [1, 2, 3], max_tokens=8, temperature=0.0)]))[("r", 0)]) == 8


def test_d24_the_prefix_cache_serves_one_user_s_text_to_another(core):
    """Keys that collide, or that do not tell domains apart. In ours a salt is a domain of its own, and cached or not
    the tokens are the same."""
    prompt = [7 * i % 200 for i in range(64)]

    def ask(name: str, salt: str | None) -> AddRequest:
        plain = request(name, prompt, max_tokens=6, temperature=0.0)
        return AddRequest(
            request_id=name, token_ids=plain.token_ids, params=plain.params, arrival_s=0.0, cache_salt=salt
        )

    core.reset_prefix_cache()
    cold, warm, other = (run(core, [ask(name, salt)])[(name, 0)] for name, salt in (("a", "x"), ("b", "x"), ("c", "y")))
    assert (cold.num_cached_tokens, other.num_cached_tokens) == (0, 0)
    assert warm.num_cached_tokens == 48
    assert cold.token_ids == warm.token_ids == other.token_ids


def test_d25_preemption_is_opaque_and_changes_the_answer(model):
    """The cache is full, somebody is thrown out, and comes back as somebody else, or never. Ours comes back and goes on
    with the very tokens it would have had; the count is in its answer and in the metrics."""
    asked = [request(f"r{i}", [i + 1] * 20, max_tokens=60, temperature=0.0) for i in range(4)]
    roomy = tokens(run(load(model), asked))
    tiny = load(model, cache_tokens=112)
    squeezed = run(tiny, asked)
    assert tokens(squeezed) == roomy
    assert sum(sequence.num_preemptions for sequence in squeezed.values()) > 0


def test_d29_the_context_is_divided_by_the_number_of_slots(model):
    """Four slots, so a quarter of the context each; or shared, and all abort when it is full. Any request of ours can
    have the whole cache, and when it is full somebody waits."""
    core = load(model, cache_tokens=160, max_num_seqs=4)
    assert core.info.max_model_len == 160
    whole = [request(f"r{i}", [i + 1] * 20, max_tokens=140, temperature=0.0) for i in range(4)]
    got = run(core, whole)
    assert {sequence.finish_reason for sequence in got.values()} == {"length"}
    assert all(len(sequence.token_ids) == 140 for sequence in got.values())


def test_d30_advice_to_increase_and_advice_to_decrease_the_same_setting(model):
    """One start says "increase it", the next "decrease it". Our advice is one number, worked out, and it works; a
    cache that runs full later is no error at all."""
    with pytest.raises(ConfigError) as refused:
        load(model, cache_tokens=64, max_model_len=300)
    numbers = re.findall(r"--kv-cache-memory-bytes (\d+)", str(refused.value))
    assert len(set(numbers)) == 1
    core = load(model, kv_cache_memory_bytes=int(numbers[0]), max_model_len=300)
    crowd = [request(f"r{i}", [i + 1] * 100, max_tokens=50, temperature=0.0) for i in range(6)]
    assert {sequence.finish_reason for sequence in run(core, crowd).values()} == {"length"}


def test_d36_python_takes_longer_than_the_device(core):
    """Four to thirteen milliseconds of Python a step. The scheduler's part of our step is counted in calls, which a
    busy machine does not change: a budget for one sequence, and one for each more."""

    def calls_in_a_step(num_sequences: int) -> int:
        for i in range(num_sequences):
            core.add(request(f"r{i}", [1, 2, i], max_tokens=30, temperature=0.0))
        for _ in range(4):
            core.step()
        calls = 0
        plan = core._scheduler.schedule()
        result = core._runner.execute(plan)

        def count(frame, event, argument) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            core._scheduler.update(plan, result)
            next_plan = core._scheduler.schedule()
        finally:
            sys.setprofile(None)
        core._scheduler.update(next_plan, core._runner.execute(next_plan))
        for i in range(num_sequences):
            core.abort(f"r{i}")
        while core.has_work:
            core.step()
        return calls

    one, many = calls_in_a_step(1), calls_in_a_step(32)
    assert one < 200
    assert (many - one) / 31 < 50
