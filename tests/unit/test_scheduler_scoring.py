"""Log-probabilities of prompts, a few rows a step; priorities under which nobody starves; repetition."""

from __future__ import annotations

import itertools

import pytest

from headrace.config.settings import SCORED_ROWS_PER_STEP as MAX_SCORED_ROWS
from headrace.engine.queue import MOST_OVERTAKEN
from headrace.engine.scheduler import Scheduler, SchedulerSettings
from headrace.protocol.ipc import RepetitionDetection
from tests.paged_oracle import Engine

ROOMY = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 4096, "num_blocks": 512, "block_size": 4}


def engine(depth: int = 1, **changes: object) -> Engine:
    return Engine(Scheduler(SchedulerSettings(**ROOMY | changes), now=lambda: 5.0), depth)  # type: ignore[arg-type]


def prompt(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def scored(run: Engine, name: str, index: int = 0) -> list[int]:
    return [report.token_id for output in run.outputs[name, index] for report in output.prompt_logprobs or ()]


def scored_rows(run: Engine) -> list[int]:
    return [sum(step.num_scored for step in plan.steps) for plan in run.plans]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_is_scored_whole_and_once_in_steps_of_bounded_rows(depth: int) -> None:
    run = engine(depth)
    run.add("a", prompt(200), prompt_logprobs=1)
    run.run()
    assert scored(run, "a") == prompt(200)[1:]
    assert max(scored_rows(run)) == MAX_SCORED_ROWS
    first_token = next(i for i, output in enumerate(run.outputs["a", 0]) if output.token_ids)
    assert not any(output.prompt_logprobs for output in run.outputs["a", 0][first_token + 1 :])
    run.assert_tokens_as_if_alone("a")


def test_a_cached_prompt_is_computed_again_to_be_scored_and_then_serves_others() -> None:
    run = engine()
    run.add("a", prompt(100), max_tokens=1)
    run.run()
    run.add("b", prompt(100), max_tokens=1, prompt_logprobs=0)
    run.run()
    assert run.outputs["b", 0][-1].num_cached_tokens == 0
    assert scored(run, "b") == prompt(100)[1:]
    run.add("c", prompt(100), max_tokens=1)
    run.run()
    assert run.outputs["c", 0][-1].num_cached_tokens == 96


def test_many_prompts_to_score_share_the_rows_and_hold_up_nobody() -> None:
    run = engine()
    for i in range(4):
        run.add(f"s{i}", prompt(150, start=1000 * i), prompt_logprobs=1, max_tokens=1)
    run.add("plain", prompt(20, start=9000), max_tokens=1)
    run.run()
    assert max(scored_rows(run)) <= MAX_SCORED_ROWS
    assert all(scored(run, f"s{i}") == prompt(150, start=1000 * i)[1:] for i in range(4))
    assert any(len(step.new_block_ids[0]) and step.num_tokens == 20 for step in run.plans[0].steps), "in the first step"


def test_without_chunked_prefill_a_prompt_is_still_scored_in_pieces() -> None:
    run = engine(enable_chunked_prefill=False)
    run.add("a", prompt(200), prompt_logprobs=1)
    run.run()
    assert scored(run, "a") == prompt(200)[1:] and max(scored_rows(run)) == MAX_SCORED_ROWS


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preemption_in_the_middle_neither_loses_nor_repeats_a_score(depth: int) -> None:
    run = engine(depth, num_blocks=44, max_num_seqs=4)
    for i in range(3):
        run.add(f"old{i}", prompt(4, start=1000 * i), max_tokens=60)
    run.step()
    run.add("a", prompt(110, start=5000), prompt_logprobs=1, max_tokens=30)
    run.run()
    assert run.outputs["a", 0][-1].num_preemptions > 0
    assert scored(run, "a") == prompt(110, start=5000)[1:]
    run.assert_tokens_as_if_alone("a")


def test_of_n_answers_the_first_alone_scores_the_prompt() -> None:
    run = engine()
    run.add("a", prompt(30), prompt_logprobs=1, n=3)
    run.run()
    assert scored(run, "a") == prompt(30)[1:]
    assert [scored(run, "a", index) for index in (1, 2)] == [[], []]
    assert sum(scored_rows(run)) == 29


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    run = engine()
    run.add("a", [7], prompt_logprobs=1)
    run.run()
    assert scored(run, "a") == [] and sum(scored_rows(run)) == 0


def test_a_low_priority_is_overtaken_so_many_times_and_no_more() -> None:
    """An urgent request always waits, and still the other one is served: after MOST_OVERTAKEN of them."""
    run = engine(max_num_seqs=1, policy="priority")
    run.add("low", prompt(8), priority=9, arrival_s=0.0)
    for i in range(MOST_OVERTAKEN + 5):
        run.add(f"high{i}", prompt(8, start=100 * i), priority=0, arrival_s=1.0)
    run.run()
    assert [name for name, _ in run.outputs].index("low") == MOST_OVERTAKEN


def test_those_who_came_before_a_low_priority_do_not_count_as_overtaking_it() -> None:
    run = engine(max_num_seqs=1, policy="priority")
    for i in range(30):
        run.add(f"early{i}", prompt(8, start=100 * i), priority=0)
    run.add("low", prompt(8, start=9000), priority=9)
    run.add("late", prompt(8, start=9500), priority=0)
    run.run()
    names = [name for name, _ in run.outputs]
    assert names[-2:] == ["late", "low"]


def test_a_backlog_of_low_priority_does_not_stop_the_urgent() -> None:
    """Each old request must be overtaken so often by itself: of 17 starts one is theirs."""
    run = engine(max_num_seqs=1, policy="priority")
    for i in range(10):
        run.add(f"low{i}", prompt(8, start=100 * i), priority=1)
    for i in range(40):
        run.add(f"high{i}", prompt(8, start=5000 + 100 * i), priority=0)
    run.run()
    first = [name[:3] for name, _ in run.outputs][: 2 * (MOST_OVERTAKEN + 1)]
    assert first.count("low") == 2


def test_repetition_ends_a_sequence_and_only_that() -> None:
    run = engine()
    run.add("a", prompt(4), max_tokens=400, repetition_detection=RepetitionDetection(1, 1, 2))
    run.add("b", prompt(4, start=50), max_tokens=40)
    run.run()
    said = run.tokens("a")
    assert run.outputs["a", 0][-1].finish_reason == "repetition"
    assert said[-1] == said[-2] and all(x != y for x, y in itertools.pairwise(said[:-1]))
    assert len(run.tokens("b")) == 40


def test_repetition_is_not_looked_for_before_min_tokens() -> None:
    run = engine()
    run.add("a", prompt(4), max_tokens=600, min_tokens=300, repetition_detection=RepetitionDetection(1, 1, 2))
    run.run()
    assert 300 <= len(run.tokens("a")) < 600
    assert run.outputs["a", 0][-1].finish_reason == "repetition"
