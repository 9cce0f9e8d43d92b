"""Random traces over the scheduler, with a device that notices every wrong slot: see tests/paged_oracle.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config.kv_blocks import KVBlocks
from headrace.engine.plan import Plan
from headrace.engine.scheduler import Scheduler, SchedulerSettings
from headrace.protocol.ipc import BACKGROUND_PRIORITY
from tests.paged_oracle import Engine, expected_tokens

traces = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@dataclass
class Arrival:
    at_step: int
    token_ids: list[int]
    options: dict[str, object]
    abort: tuple[int, int | None] | None = field(default=None)
    """(steps after the arrival, index or None)."""


prompts = st.builds(
    lambda start, count, own: [start + i for i in range(count)] + own,
    st.sampled_from([0, 100]),  # two families that share prefixes within themselves
    st.integers(0, 30),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
)
arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 25),
    token_ids=prompts,
    options=st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 14),
            "n": st.sampled_from([1, 1, 1, 2, 4]),
            "priority": st.sampled_from([0, 1, 2, BACKGROUND_PRIORITY, BACKGROUND_PRIORITY + 1]),
            "arrival_s": st.integers(0, 9).map(float),
            "cache_salt": st.sampled_from([None, None, "a", "b"]),
            "stop_token_ids": st.sampled_from([(), (3, 4, 5), tuple(range(0, 50, 4))]),
            "min_tokens": st.sampled_from([0, 0, 3]),
            "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        }
    ),
    abort=st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 12), st.sampled_from([None, 0, 1]))),
)


WINDOWS = st.one_of(
    st.just((None,)),
    st.lists(st.one_of(st.none(), st.sampled_from([1, 2, 5, 8, 17])), min_size=1, max_size=3).map(tuple),
)


@st.composite
def scheduler_settings(draw: st.DrawFn) -> SchedulerSettings:
    """Caches from just large enough for the largest request alone (50 tokens) to roomy; one group of layers to three,
    with windows and without; no host tier, one of a block, or more."""
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    chunked = draw(st.booleans())
    max_num_batched_tokens = draw(st.integers(1, 64)) if chunked else draw(st.integers(36, 64))
    windows = draw(WINDOWS)
    least = KVBlocks(windows, block_size, max_num_batched_tokens).most_held(50)
    return SchedulerSettings(
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=draw(st.sampled_from([50, 1000])),
        num_blocks=least + draw(st.sampled_from([0, 1, 3, 40])),
        block_size=block_size,
        windows=windows,
        num_host_blocks=draw(st.sampled_from([0, 0, 1, 5, 60])),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=chunked,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        step_time_target_s=draw(st.sampled_from([1e-6, 0.02, 10.0])),
        max_scored_rows=draw(st.sampled_from([1, 5, 64])),
    )


def seconds_of(plan: Plan) -> float:
    """A device of 1 ms a step and 0.1 ms a token, with a hiccup now and then."""
    return (0.001 + 0.0001 * plan.num_tokens) * (20 if plan.step % 17 == 5 else 1)


def play(
    config: SchedulerSettings, trace: list[Arrival], depth: int, fails: Callable[[str], bool] = lambda move: False
) -> tuple[Engine, set[tuple[str, int]]]:
    """Run a trace to its end; returns the engine and the sequences that were aborted on the way."""
    engine = Engine(Scheduler(config, now=lambda: 10.0), depth, seconds_of)
    engine.oracle.fails = fails
    engine.oracle.move_s = (1e-6, 1e-6, 1e-4)[len(trace) % 3]
    aborts: list[tuple[int, str, int | None]] = []
    aborted: set[tuple[str, int]] = set()
    for step in range(40):
        for i, arrival in enumerate(trace):
            if arrival.at_step == step:
                name = f"request-{i}"
                message = engine.add(name, arrival.token_ids, **arrival.options)  # type: ignore[arg-type]
                if arrival.abort is not None:
                    after, index = arrival.abort
                    aborts.append((step + after, name, index))
                    ended = range(message.params.n) if index is None else [index]
                    aborted |= {(name, i) for i in ended}
        for at, name, index in aborts:
            if at == step:
                engine.scheduler.abort(name, index)
                engine.scheduler.check_integrity()
        if engine.scheduler.has_work or engine.in_flight:
            assert engine.step() is not None, "there is work, and nothing is scheduled or in flight"
    engine.run()
    return engine, aborted


@settings(traces, max_examples=100)
@given(scheduler_settings(), st.lists(arrivals, min_size=2, max_size=8), st.randoms(use_true_random=False), st.data())
def test_moves_that_fail_cost_time_and_nothing_else(
    config: SchedulerSettings, trace: list[Arrival], random: Random, data: st.DataObject
) -> None:
    """Of the moves to the host tier and back so many fail."""
    share = data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    least = config.blocks.most_held(50)
    config = replace(config, num_blocks=least, num_host_blocks=data.draw(st.sampled_from([2, 60])))
    engine, aborted = play(config, trace, 1, lambda move: random.random() < share)
    engine.assert_nothing_left()
    for name, message in engine.requests.items():
        for index in range(message.params.n):
            if (name, index) not in aborted:
                assert engine.tokens(name, index) == expected_tokens(message, index)


def assert_prompt_scored_once(engine: Engine, name: str, finished: bool) -> None:
    """Whoever of the request's sequences computed it, however often: every token's score came once, in order."""
    message = engine.requests[name]
    outputs = [output for index in range(message.params.n) for output in engine.outputs.get((name, index), [])]
    scored = [report.token_id for output in outputs for report in output.prompt_logprobs or ()]
    wanted = message.token_ids[1:] if message.params.prompt_logprobs is not None else []
    assert scored == (wanted if finished else wanted[: len(scored)])


@settings(traces, max_examples=200)
@given(scheduler_settings(), st.lists(arrivals, min_size=1, max_size=10), st.sampled_from([1, 1, 2, 3]))
def test_whatever_happens_everyone_gets_the_tokens_it_would_get_alone(
    config: SchedulerSettings, trace: list[Arrival], depth: int
) -> None:
    engine, aborted = play(config, trace, depth)
    engine.assert_nothing_left()
    for name, message in engine.requests.items():
        everybody = not any((name, index) in aborted for index in range(message.params.n))
        assert_prompt_scored_once(engine, name, everybody)
        for index in range(message.params.n):
            expected, outputs = expected_tokens(message, index), engine.outputs.get((name, index), [])
            if (name, index) in aborted:
                assert engine.tokens(name, index) == expected[: len(engine.tokens(name, index))]
            else:
                assert engine.tokens(name, index) == expected
                assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
                last = outputs[-1]
                stopped = expected[-1] in message.params.stop_token_ids and len(expected) > message.params.min_tokens
                assert last.finish_reason == ("stop" if stopped else "length")
                assert last.stop_token_id == (expected[-1] if stopped else None)


@settings(traces, max_examples=60)
@given(scheduler_settings(), st.lists(arrivals, min_size=1, max_size=10))
def test_no_step_exceeds_its_budgets(config: SchedulerSettings, trace: list[Arrival]) -> None:
    engine, _ = play(config, trace, depth=1)
    for plan in engine.plans:
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.steps) <= config.max_running
        assert sum(step.num_scored for step in plan.steps) <= config.max_scored_rows


@settings(traces, max_examples=60)
@given(
    st.lists(arrivals, min_size=2, max_size=8),
    st.sampled_from(["fcfs", "priority"]),
    st.sampled_from([1, 4]),
    WINDOWS,
    st.sampled_from([0, 3, 60]),
    st.integers(0, 40),
)
def test_a_cache_for_one_request_only_still_serves_them_all(
    trace: list[Arrival],
    policy: str,
    block_size: int,
    windows: tuple[int | None, ...],
    num_host_blocks: int,
    fail_at: int,
) -> None:
    """The smallest cache, everybody at once, and one step that fails on the way."""
    config = SchedulerSettings(
        max_num_seqs=8, max_num_batched_tokens=20, max_model_len=50,
        num_blocks=KVBlocks(windows, block_size, 20).most_held(50),
        block_size=block_size, windows=windows, num_host_blocks=num_host_blocks, policy=policy,  # type: ignore[arg-type]
    )  # fmt: skip
    engine = Engine(Scheduler(config, now=lambda: 10.0))
    for i, arrival in enumerate(trace):
        engine.add(f"request-{i}", arrival.token_ids, **arrival.options)  # type: ignore[arg-type]
    failed: set[tuple[str, int]] = set()
    while engine.scheduler.has_work:
        if len(engine.plans) == fail_at:
            plan = engine.scheduler.schedule()
            assert plan is not None
            engine.plans.append(plan)
            failed = {(output.request_id, output.index) for output in engine.scheduler.fail(plan, "boom")}
            engine.scheduler.check_integrity()
        else:
            assert engine.step() is not None
    engine.assert_nothing_left()
    for name, message in engine.requests.items():
        for index in range(message.params.n):
            if (name, index) not in failed:
                assert engine.tokens(name, index) == expected_tokens(message, index)
