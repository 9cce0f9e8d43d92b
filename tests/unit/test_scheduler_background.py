"""Work that nobody waits for, beside requests that somebody does."""

from __future__ import annotations

import pytest

from headrace.engine.background import SHARE
from headrace.engine.plan import Plan
from headrace.engine.scheduler import Scheduler, SchedulerSettings
from headrace.protocol.ipc import BACKGROUND_PRIORITY, AddRequest, SamplingParams
from tests.paged_oracle import Engine


def engine(**changes: object) -> Engine:
    fields: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 4096,
        "num_blocks": 512,
        "block_size": 4,
    }
    return Engine(Scheduler(SchedulerSettings(**fields | changes), now=lambda: 5.0))  # type: ignore[arg-type]


def prompt(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def batch(run: Engine, count: int, max_tokens: int = 30, num_prompt: int = 8) -> None:
    for i in range(count):
        tokens = prompt(num_prompt, start=10_000 * (i + 1))
        run.add(f"batch-{i}", tokens, max_tokens=max_tokens, priority=BACKGROUND_PRIORITY)


def num_tokens(run: Engine, name: str) -> int:
    return len(run.tokens(name))


def steps_until(run: Engine, name: str, count: int) -> int:
    """Steps until the request has so many tokens more."""
    goal, steps = num_tokens(run, name) + count, 0
    while num_tokens(run, name) < goal:
        assert run.step() is not None
        steps += 1
    return steps


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_batch_alone_runs_as_any_request(policy: str) -> None:
    run = engine(policy=policy)
    batch(run, 4, max_tokens=5)
    run.run()
    assert [len(plan.steps) for plan in run.plans if plan.steps] == [4] * 5
    for name in run.requests:
        run.assert_tokens_as_if_alone(name)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_beside_a_live_request_a_batch_gets_a_fifth_of_the_time(policy: str) -> None:
    def seconds(plan: Plan) -> float:
        return 0.001 + 0.004 * max(0, len(plan.steps) - 1)  # rows of the batch are dear

    run = engine(policy=policy)
    run.step_s = seconds
    batch(run, 5, max_tokens=300)
    run.step()
    run.add("live", prompt(8), max_tokens=300)
    run.plans.clear()
    assert steps_until(run, "live", 300) == 300, "in every step"
    mixed = [plan for plan in run.plans if len(plan.steps) > 1]
    total, shared = sum(map(seconds, run.plans)), sum(map(seconds, mixed))
    assert 0.8 * SHARE < shared / total <= 1.2 * SHARE
    assert all(len(plan.steps) == 6 for plan in mixed), "and then the whole of it goes at once"
    assert len(run.plans[0].steps) == 1, "the first token comes without it"
    run.run()
    for name in run.requests:
        run.assert_tokens_as_if_alone(name)


def test_a_live_request_takes_a_batchs_place() -> None:
    run = engine(max_num_seqs=2)
    batch(run, 2, max_tokens=100)
    run.step()
    run.add("live", prompt(8), max_tokens=5)
    assert steps_until(run, "live", 5) <= 7
    assert run.scheduler.stats(0.0).preemptions_total == 1
    run.run()
    for name in run.requests:
        run.assert_tokens_as_if_alone(name)


def test_a_live_request_gets_a_batchs_blocks() -> None:
    run = engine(num_blocks=60)
    batch(run, 5, max_tokens=20, num_prompt=20)
    for _ in range(10):
        run.step()
    run.add("live", prompt(150), max_tokens=5)
    assert steps_until(run, "live", 5) <= 12
    assert num_tokens(run, "batch-4") < 20
    run.run()
    for name in run.requests:
        run.assert_tokens_as_if_alone(name)


def test_live_requests_keep_a_batch_waiting_for_as_long_as_they_come() -> None:
    run = engine(max_num_seqs=1, policy="priority")
    batch(run, 1, max_tokens=2)
    for i in range(30):
        run.add(f"live-{i}", prompt(8, start=100 * i), max_tokens=2, priority=9, arrival_s=1.0)
    run.run()
    starts = [new.token_ids[0] for plan in run.plans for new in plan.new]
    assert starts[-1] == 10_000


def test_a_batch_is_preempted_before_live_requests_that_came_later() -> None:
    run = engine(num_blocks=8)
    batch(run, 1, max_tokens=16)
    run.step()
    run.add("live", prompt(8), max_tokens=16)
    run.run()
    live = [output.num_preemptions for output in run.outputs["live", 0]]
    assert max(live) == 0
    assert max(output.num_preemptions for output in run.outputs["batch-0", 0]) >= 1


def test_a_batch_takes_no_live_requests_place_in_the_queue() -> None:
    run = engine(max_num_seqs=2, max_num_queued_reqs=1)
    batch(run, 6)
    run.step()
    for i in range(3):
        run.add(f"live-{i}", prompt(8, start=100 * i))
    refused = run.scheduler.add(
        AddRequest(request_id="more", token_ids=[1], params=SamplingParams(max_tokens=1), arrival_s=0.0)
    )
    assert refused is not None and refused.code == "queue_full"
    run.run()
    for name in run.requests:
        run.assert_tokens_as_if_alone(name)
