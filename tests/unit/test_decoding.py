"""The short way of a decode step comes to what the long way does."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.decoding import Decoding
from headrace.engine.plan import Plan, Sampled, StepResult
from headrace.engine.scheduler import Scheduler, SchedulerSettings
from headrace.protocol.ipc import RepetitionDetection, SequenceOutput
from tests.paged_oracle import Engine, PagedOracle
from tests.unit.test_scheduler_traces import Arrival, arrivals, play, scheduler_settings, traces


class LongWay(PagedOracle):
    """Tells of every token as if it had been sampled in a step of its own kind."""

    def execute(self, plan: Plan, seconds: float = 0.01) -> StepResult:
        result = super().execute(plan, seconds)
        tokens = zip(plan.steps, result.token_ids, strict=False)
        sampled = tuple(Sampled(step.seq_id, (token_id,)) for step, token_id in tokens)
        return msgspec.structs.replace(result, sampled=sampled, token_ids=()) if sampled else result


def played(
    config: SchedulerSettings, trace: list[Arrival], depth: int, monkeypatch: pytest.MonkeyPatch, *, long: bool
) -> tuple[list[Plan], dict[tuple[str, int], list[SequenceOutput]]]:
    with monkeypatch.context() as patch:
        if long:
            patch.setattr(Decoding, "next_steps", lambda self, running: None)
            patch.setattr("tests.paged_oracle.PagedOracle", LongWay)
        engine, _ = play(config, trace, depth)
    return engine.plans, engine.outputs


@traces
@given(scheduler_settings(), st.lists(arrivals, min_size=1, max_size=6), st.sampled_from([1, 1, 2]))
def test_plans_and_outputs_are_those_of_the_long_way(
    config: SchedulerSettings, trace: list[Arrival], depth: int
) -> None:
    patch = pytest.MonkeyPatch()
    short, long = (played(config, trace, depth, patch, long=way) for way in (False, True))
    assert short == long


def steady(num_sequences: int, **params: object) -> Engine:
    settings = SchedulerSettings(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100, num_blocks=90, block_size=4
    )
    engine = Engine(Scheduler(settings, now=lambda: 0.0))
    for i in range(num_sequences):
        engine.add(f"r{i}", [i, 7, 8], **{"max_tokens": 30, **params})
    return engine


def test_nearly_every_step_of_sequences_that_go_on_together_is_taken_the_short_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[bool] = []
    next_steps = Decoding.next_steps

    def watched(self: Decoding, running: Sequence[object]):
        steps = next_steps(self, running)
        taken.append(steps is not None)
        return steps

    monkeypatch.setattr(Decoding, "next_steps", watched)
    engine = steady(3)
    engine.run()
    assert [plan.continues for plan in engine.plans] == [False, False] + [True] * 28 + [False]
    assert sum(taken) == 28 - 7, "one in four goes into a new block"
    for i in range(3):
        engine.assert_tokens_as_if_alone(f"r{i}")


def test_a_newcomer_an_end_and_an_abort_are_no_next_tokens() -> None:
    engine = steady(2)
    for _ in range(5):
        engine.step()
    assert engine.plans[-1].continues
    engine.add("late", [1, 2, 3], max_tokens=4)
    engine.step()
    engine.step()
    assert [plan.continues for plan in engine.plans[-2:]] == [False, False]
    engine.step()
    assert engine.plans[-1].continues
    engine.scheduler.abort("r0")
    engine.step()
    assert not engine.plans[-1].continues
    engine.run()
    engine.assert_tokens_as_if_alone("r1")
    engine.assert_tokens_as_if_alone("late")


def test_a_repetition_ends_a_sequence_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.paged_oracle.next_token", lambda prefix, seed, index: 5)
    rule = RepetitionDetection(max_pattern_size=2, min_pattern_size=1, min_count=4)
    engine = steady(2, repetition_detection=rule)
    engine.run()
    assert [engine.outputs["r0", 0][-1].finish_reason, len(engine.tokens("r0"))] == ["repetition", 4]
