"""The scheduler's rules, one example each. Random traces over all of them are in test_scheduler_traces.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.engine.plan import Plan, Sampled, SequenceStep, StepResult
from headrace.engine.scheduler import Scheduler, SchedulerSettings
from headrace.engine.step_time import TILE_ROWS, StepLoad
from headrace.protocol.ipc import AddRequest, SamplingParams
from tests.paged_oracle import Engine, expected_tokens

ROOMY = SchedulerSettings(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=4096, num_blocks=512, block_size=4)


def engine(depth: int = 1, **changes: object) -> Engine:
    fields = {name: getattr(ROOMY, name) for name in SchedulerSettings.__dataclass_fields__}
    return Engine(Scheduler(SchedulerSettings(**fields | changes), now=lambda: 5.0), depth)  # type: ignore[arg-type]


def prompt(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def message(count: int, max_tokens: int = 4, n: int = 1, name: str = "r", **fields: Any) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return AddRequest(request_id=name, token_ids=prompt(count), params=params, arrival_s=0.0, **fields)


def tokens_given(plan: Plan) -> list[int]:
    return [step.num_tokens for step in plan.steps]


def one(plan: Plan | None) -> Plan:
    assert plan is not None
    return plan


def running_decodes(run: Engine, count: int = 8, max_tokens: int = 40) -> None:
    """`count` sequences that have their first token."""
    for i in range(count):
        run.add(f"decode-{i}", prompt(3, start=1000 * i), max_tokens=max_tokens)
    run.step()


# one budget


def test_a_prompt_then_one_token_a_step_until_max_tokens() -> None:
    run = engine()
    run.add("a", prompt(10), max_tokens=3)
    run.run()
    assert [tokens_given(plan) for plan in run.plans if plan.steps] == [[10], [1], [1]]
    assert [step.start for plan in run.plans for step in plan.steps] == [0, 10, 11]
    run.assert_tokens_as_if_alone("a")
    assert run.outputs["a", 0][-1].finish_reason == "length"


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_one_samples() -> None:
    run = engine(max_num_batched_tokens=32)
    run.add("a", prompt(70), max_tokens=1)
    run.run()
    steps = [step for plan in run.plans for step in plan.steps]
    assert [(step.start, step.num_tokens, step.samples) for step in steps] == [
        (0, 32, False),
        (32, 32, False),
        (64, 6, True),
    ]


def test_decodes_come_before_prefill_in_every_step() -> None:
    run = engine(max_num_seqs=4, max_num_batched_tokens=10)
    run.add("a", prompt(4), max_tokens=9)
    run.step()
    run.add("b", prompt(20, start=50))
    plan = one(run.step())
    assert tokens_given(plan) == [1, 9]


def test_without_chunking_a_prompt_goes_whole_or_not_at_all() -> None:
    run = engine(enable_chunked_prefill=False, max_num_batched_tokens=32)
    run.add("a", prompt(20))
    run.add("b", prompt(20, start=50))
    assert tokens_given(one(run.step())) == [20]
    assert tokens_given(one(run.step())) == [1, 20]


def test_a_plan_may_only_say_what_to_drop_and_then_there_is_nothing_to_do() -> None:
    run = engine()
    run.add("a", prompt(3), max_tokens=1)
    first = one(run.step())
    assert run.scheduler.has_work
    last = one(run.step())
    assert last == Plan(step=1, dropped=(first.steps[0].seq_id,), new=(), block_copies=(), steps=())
    assert run.scheduler.schedule() is None
    assert not run.scheduler.has_work


# admission


@pytest.mark.parametrize(
    ("changes", "count", "max_tokens", "code", "numbers"),
    [
        ({"max_model_len": 100}, 90, 20, "context_length_exceeded", ["100 tokens", "110 tokens", "90 in", "20 for"]),
        ({"max_model_len": 100}, 200, 1, "context_length_exceeded", ["100 tokens", "201 tokens", "200 in"]),
        ({"num_blocks": 10}, 40, 2, "kv_cache_too_small", ["41 tokens", "holds 40", "--kv-cache-memory-bytes"]),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, 65, 1, "context_length_exceeded",
            ["65 tokens", "64 tokens", "--enable-chunked-prefill"],
        ),
        ({}, 0, 1, "invalid_request", ["empty"]),
        ({}, 1, 0, "invalid_request", ["max_tokens is 0"]),
    ],
)  # fmt: skip
def test_what_can_never_be_served_is_refused_with_the_numbers(
    changes: dict[str, object], count: int, max_tokens: int, code: str, numbers: list[str]
) -> None:
    run = engine(**changes)
    refused = run.scheduler.add(message(count, max_tokens))
    assert refused is not None
    assert refused.code == code
    for number in numbers:
        assert number in refused.message
    assert not run.scheduler.has_work


def test_the_context_message_is_the_known_one() -> None:
    refused = engine(max_model_len=100).scheduler.add(message(90, 20))
    assert refused is not None
    assert refused.message.startswith(
        "This model's maximum context length is 100 tokens. However, you requested 110 tokens "
        "(90 in the prompt, 20 for the completion)."
    )


def test_a_request_that_just_fits_the_whole_cache_is_served() -> None:
    run = engine(num_blocks=10)
    run.add("a", prompt(38), max_tokens=3)  # 40 stored: the last token is never computed
    run.run()
    run.assert_tokens_as_if_alone("a")


def test_the_queue_is_bounded_beyond_what_could_start_at_once() -> None:
    run = engine(max_num_seqs=2, max_num_queued_reqs=3)
    for i in range(5):
        run.add(f"r{i}", prompt(4), max_tokens=8)
    refused = run.scheduler.add(message(4, name="r5"))
    assert refused is not None
    assert refused.code == "queue_full"
    run.step()
    assert run.scheduler.stats(0.0).num_waiting == 3
    assert run.scheduler.add(message(4, name="r6")) is not None
    run.run()
    assert run.scheduler.add(message(4, name="r7")) is None


def test_the_queue_is_bounded_in_prompt_tokens_too() -> None:
    run = engine(max_num_seqs=1, max_num_queued_tokens=100)
    run.add("running", prompt(300), max_tokens=8)
    run.step()
    run.add("first", prompt(60), max_tokens=8)
    refused = run.scheduler.add(message(41, name="r"))
    assert refused is not None
    assert refused.code == "queue_full"
    for part in ("60 tokens", "this one has 41", "holds 100 (--max-num-queued-tokens)"):
        assert part in refused.message
    run.add("second", prompt(40), max_tokens=8)
    run.run()
    run.add("alone", prompt(300), max_tokens=1)  # nothing waits: it is not the queue that takes it
    run.run()
    run.assert_nothing_left()


def test_prompts_that_can_start_at_once_do_not_count_against_the_queue() -> None:
    """A burst finds an idle engine: as many as it runs together, and the queue besides."""
    run = engine(max_num_seqs=3, max_num_queued_tokens=100)
    for i in range(3):
        run.add(f"r{i}", prompt(90), max_tokens=8)
    run.add("waits", prompt(100), max_tokens=8)
    refused = run.scheduler.add(message(1, name="r"))
    assert refused is not None
    assert "100 tokens" in refused.message
    run.run()


def test_a_request_id_is_used_by_one_request_at_a_time() -> None:
    run = engine()
    run.add("r", prompt(4), max_tokens=2)
    refused = run.scheduler.add(message(4))
    assert refused is not None
    assert refused.code == "invalid_request"
    run.run()
    assert run.scheduler.add(message(4)) is None


def test_a_large_request_that_waits_for_blocks_is_not_overtaken_by_small_ones() -> None:
    run = engine(num_blocks=20)
    run.add("running", prompt(40), max_tokens=20)
    run.step()
    run.add("large", prompt(50, start=500), max_tokens=4)
    run.step()
    for i in range(20):
        run.add(f"small-{i}", prompt(49, start=600 + 50 * i), max_tokens=2)
    run.run()
    started = [step.seq_id for plan in run.plans for step in plan.steps if step.start == 0]
    large = [new.seq_id for plan in run.plans for new in plan.new if new.num_prompt_tokens == 50]
    assert started.index(large[0]) <= 3, "two prompts of 49 tokens may pass one of 50, no more"


def test_the_waiting_reason_is_said() -> None:
    run = engine(max_num_seqs=1)
    run.add("a", prompt(4), max_tokens=8)
    run.add("b", prompt(4), max_tokens=8)
    run.step()
    assert run.scheduler.stats(0.0).waiting_reason == "max_num_seqs"
    run = engine(num_blocks=4)
    run.add("a", prompt(12), max_tokens=4)
    run.add("b", prompt(12, start=50), max_tokens=4)
    run.step()
    stats = run.scheduler.stats(step_s=0.25)
    assert (stats.waiting_reason, stats.num_running, stats.num_waiting) == ("kv_cache", 1, 1)
    assert (stats.step, stats.step_s, stats.num_prefill_tokens, stats.kv_blocks_used) == (0, 0.25, 12, 3)


# step time and order of prefills


def test_without_decodes_a_prompt_takes_the_whole_budget() -> None:
    run = engine(step_time_target_s=1e-9)
    run.add("a", prompt(300))
    assert tokens_given(one(run.step())) == [256]


def test_while_decodes_run_the_chunk_keeps_the_step_within_its_target() -> None:
    run = engine(max_num_batched_tokens=2048, num_blocks=4096, step_time_target_s=0.1)
    run.step_s = lambda plan: 0.01 + 0.0005 * StepLoad.of(plan.steps).padded_rows
    running_decodes(run)
    run.add("long", prompt(4000), max_tokens=2)
    plans = [one(run.step()) for _ in range(15)]
    seconds = [run.step_s(plan) for plan in plans]
    assert max(seconds) <= 0.1 * 10 / 9 + 0.001, "one of nine requests waits for its first token"
    assert seconds[-1] >= 0.09, "and uses it"
    assert all(plan.num_tokens % TILE_ROWS == 0 for plan in plans), "whole tiles"


def test_the_more_requests_wait_for_their_first_token_the_longer_a_step_may_last() -> None:
    run = engine(max_num_seqs=32, max_num_batched_tokens=2048, num_blocks=4096, step_time_target_s=0.1)
    run.step_s = lambda plan: 0.01 + 0.0005 * StepLoad.of(plan.steps).padded_rows
    running_decodes(run, count=4)
    for index in range(60):
        run.add(f"one of many {index}", prompt(2000, start=1000 * index), max_tokens=2)
    plans = [one(run.step()) for _ in range(15)]
    seconds = [run.step_s(plan) for plan in plans]
    assert 0.17 <= seconds[-1] <= 0.1 * (1 + 28 / 32) + 0.001, "28 of the 32 that may run do, beside four that decode"


def test_decodes_that_exceed_the_target_alone_still_leave_prefill_a_minimum() -> None:
    run = engine(step_time_target_s=1e-9)
    running_decodes(run, count=7)
    run.add("long", prompt(200, start=50_000), max_tokens=1)
    plans = [one(run.step()) for _ in range(12)]
    assert [tokens_given(plan)[7:] for plan in plans] == [[17]] * 11 + [[13]], "each fills the third tile of 8"


def test_where_decodes_need_most_of_the_target_prefill_gets_as_much_time_as_they_take() -> None:
    """A slow device: 32 rows cost 60 ms, and 80 ms come on top of every step. Ten decodes alone take 110 ms of 150."""
    run = engine(max_num_batched_tokens=512, num_blocks=4096, step_time_target_s=0.15)
    run.step_s = lambda plan: 0.08 + 0.06 * StepLoad.of(plan.steps).padded_rows / 32
    running_decodes(run, count=10)
    run.add("long", prompt(1500, start=50_000), max_tokens=1)
    plans = [one(run.step()) for _ in range(12)]
    assert max(run.step_s(plan) for plan in plans) <= 0.226, "one and a half times the target"
    assert plans[-1].num_tokens >= 72, "where the target itself would leave room for 32"


def test_decodes_that_need_more_than_half_of_the_target_are_given_twice_of_it() -> None:
    run = engine(max_num_seqs=40, max_num_batched_tokens=512, num_blocks=4096, step_time_target_s=0.15)
    run.step_s = lambda plan: 0.08 + 0.06 * StepLoad.of(plan.steps).padded_rows / 32
    running_decodes(run, count=32)
    run.add("long", prompt(1500, start=50_000), max_tokens=1)
    plans = [one(run.step()) for _ in range(12)]
    assert 0.25 <= max(run.step_s(plan) for plan in plans) <= 0.281, "twice what the decodes alone take, 140 ms"


def test_the_minimum_chunk_fills_the_tile_that_it_ends_in() -> None:
    run = engine(max_num_seqs=40, step_time_target_s=1e-9)
    running_decodes(run, count=31)
    run.add("long", prompt(200, start=50_000), max_tokens=1)
    assert tokens_given(one(run.step()))[31:] == [17]


def test_at_a_long_context_the_minimum_shrinks_so_that_a_step_stays_within_three_targets() -> None:
    """Decodes take the whole target alone, and attention is dear: the reference kernels on a small CPU."""
    run = engine(max_num_batched_tokens=512, max_model_len=8000, num_blocks=4096, step_time_target_s=0.1)
    run.step_s = lambda plan: 0.003 * StepLoad.of(plan.steps).padded_rows + 4e-6 * StepLoad.of(plan.steps).pairs
    running_decodes(run, max_tokens=400)
    run.add("long", prompt(2000, start=50_000), max_tokens=1)
    while ("long", 0) not in run.outputs:
        assert run.step_s(one(run.step())) < 0.3
    assert min(len(plan.steps) for plan in run.plans[1:]) == 9, "and every step advances the prompt"


def test_a_short_prompt_passes_a_long_one() -> None:
    run = engine(step_time_target_s=1e-9)
    running_decodes(run, count=8)
    run.add("long", prompt(200, start=50_000), max_tokens=1)
    run.step()
    run.add("short", prompt(20, start=60_000), max_tokens=2)
    plan = one(run.step())
    assert [new.num_prompt_tokens for new in plan.new] == [20]
    run.run()
    run.assert_tokens_as_if_alone("long")


def test_a_long_prompt_is_passed_by_no_more_tokens_than_it_has() -> None:
    run = engine(max_num_seqs=8, step_time_target_s=1e-9)
    running_decodes(run, count=1, max_tokens=200)
    run.add("long", prompt(100, start=50_000), max_tokens=1)
    while ("long", 0) not in run.outputs:
        run.add(f"short-{len(run.plans)}", prompt(20, start=60_000 + 100 * len(run.plans)), max_tokens=1)
        run.step()
    shorts = {new.seq_id for plan in run.plans for new in plan.new if new.num_prompt_tokens == 20}
    passed = sum(step.num_tokens for plan in run.plans for step in plan.steps if step.seq_id in shorts)
    assert 100 <= passed <= 100 + 31, "its length, and the chunk that reached it"


def test_equal_prompts_are_served_first_come_first_served() -> None:
    run = engine(max_num_seqs=2)
    for i in range(6):
        run.add(f"r{i}", prompt(10, start=100 * i), max_tokens=2)
    run.run()
    assert list(run.outputs) == [(f"r{i}", 0) for i in range(6)]


def test_priority_decides_before_arrival() -> None:
    run = engine(max_num_seqs=1, policy="priority")
    run.add("later", prompt(4), arrival_s=2.0, priority=1)
    run.add("earlier", prompt(4), arrival_s=1.0, priority=1)
    run.add("urgent", prompt(50), arrival_s=3.0, priority=0)
    run.run()
    assert list(run.outputs) == [("urgent", 0), ("earlier", 0), ("later", 0)]


def test_fcfs_ignores_priority() -> None:
    run = engine(max_num_seqs=1)
    run.add("first", prompt(4), priority=9)
    run.add("second", prompt(4), priority=0)
    run.run()
    assert list(run.outputs) == [("first", 0), ("second", 0)]


# prefix cache


def test_a_second_request_computes_only_what_the_first_did_not() -> None:
    run = engine()
    run.add("a", prompt(40), max_tokens=1)
    run.run()
    run.add("b", [*prompt(32), 900, 901], max_tokens=1)
    run.run()
    [step] = [step for plan in run.plans[-2:] for step in plan.steps]
    assert (step.start, step.num_tokens) == (32, 2)
    assert run.outputs["b", 0][0].num_cached_tokens == 32
    stats = run.scheduler.stats(0.0)
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (40 + 34, 32)


def test_reset_forgets_what_nobody_holds() -> None:
    run = engine()
    run.add("a", prompt(40), max_tokens=1)
    run.run()
    assert run.scheduler.reset_prefix_cache() == 10
    run.add("b", prompt(40), max_tokens=1)
    run.run()
    assert run.outputs["b", 0][0].num_cached_tokens == 0


def test_queueing_time_is_told_with_the_first_token_only() -> None:
    run = engine()
    run.add("a", prompt(4), max_tokens=2, arrival_s=3.5)
    run.run()
    assert [output.queue_s for output in run.outputs["a", 0]] == [1.5, 0.0]


# forks


def test_forks_wait_for_the_prompt_then_share_it_and_copy_its_last_block() -> None:
    run = engine(enable_prefix_caching=False)
    run.add("a", prompt(10), max_tokens=6, n=3)
    first = one(run.step())
    assert tokens_given(first) == [10]
    assert run.scheduler.stats(0.0).num_waiting == 2
    [source] = first.steps[0].new_block_ids
    second = one(run.step())
    assert tokens_given(second) == [1, 1, 1]
    assert [step.start for step in second.steps] == [10, 9, 9]
    forks = [step.new_block_ids[0] for step in second.steps[1:]]
    assert [block_ids[:2] for block_ids in forks] == [source[:2], source[:2]]
    assert second.block_copies == tuple((source[2], block_ids[2]) for block_ids in forks)
    run.run()
    run.assert_tokens_as_if_alone("a")
    assert len({tuple(run.tokens("a", index)) for index in range(3)}) == 3
    run.assert_nothing_left()


def test_forks_of_a_sequence_that_is_gone_take_the_prompt_from_the_cache() -> None:
    run = engine()
    run.add("a", prompt(10), max_tokens=1, n=3)
    run.run()
    assert sum(plan.num_tokens for plan in run.plans) == 10 + 2 * 2
    assert not any(plan.block_copies for plan in run.plans)
    run.assert_tokens_as_if_alone("a")


def test_aborting_the_first_sequence_leaves_its_forks_alive() -> None:
    run = engine(max_num_batched_tokens=8)
    run.add("a", prompt(20), max_tokens=3, n=3)
    run.step()
    run.scheduler.abort("a", 0)
    run.scheduler.abort("a", 1)
    run.run()
    assert list(run.outputs) == [("a", 2)]
    assert run.tokens("a", 2) == expected_tokens(run.requests["a"], 2)
    run.assert_nothing_left()


def test_the_cache_counts_a_request_once_however_many_sequences_it_has() -> None:
    run = engine()
    run.add("a", prompt(10), max_tokens=4, n=4)
    run.run()
    assert run.scheduler.stats(0.0).prefix_queries_total == 10


# preemption


def test_out_of_blocks_the_last_comer_is_preempted_and_gets_the_same_tokens() -> None:
    run = engine(num_blocks=8)
    run.add("a", prompt(8), max_tokens=16)
    run.step()
    run.add("b", prompt(8, start=50), max_tokens=16)
    run.run()
    assert run.scheduler.stats(0.0).preemptions_total > 0
    assert [output.num_preemptions for output in run.outputs["a", 0]] == [0] * 16
    assert run.outputs["b", 0][-1].num_preemptions == run.scheduler.stats(0.0).preemptions_total
    run.assert_tokens_as_if_alone("a")
    run.assert_tokens_as_if_alone("b")
    run.assert_nothing_left()


def test_a_preempted_sequence_comes_back_as_new_with_all_its_tokens() -> None:
    run = engine(num_blocks=8)
    run.add("a", prompt(8), max_tokens=16)
    run.add("b", prompt(8, start=50), max_tokens=16)
    run.run()
    names = [new for plan in run.plans for new in plan.new]
    again = names[2]
    assert again.token_ids[:8] == tuple(prompt(8, start=50))
    assert len(again.token_ids) > 8
    assert list(again.token_ids[8:]) == run.tokens("b")[: len(again.token_ids) - 8]
    assert again.num_prompt_tokens == 8
    assert len({new.seq_id for new in names}) == len(names), "under an id of its own"


def test_nobody_is_admitted_while_a_preempted_sequence_waits() -> None:
    run = engine(num_blocks=8)
    run.add("a", prompt(8), max_tokens=16)
    run.add("b", prompt(8, start=50), max_tokens=16)
    while run.scheduler.stats(0.0).preemptions_total == 0:
        run.step()
    run.add("c", prompt(1, start=99), max_tokens=2)
    run.run()
    order = [new.token_ids[0] for plan in run.plans for new in plan.new]
    assert order.index(50, 2) < order.index(99)


def test_under_priority_the_least_urgent_is_preempted() -> None:
    run = engine(num_blocks=8, policy="priority")
    run.add("low", prompt(8), max_tokens=16, priority=5)
    run.step()
    run.add("high", prompt(8, start=50), max_tokens=16, priority=1)
    run.run()
    assert run.outputs["high", 0][-1].num_preemptions == 0
    assert run.outputs["low", 0][-1].num_preemptions > 0
    run.assert_tokens_as_if_alone("low")


# ends


def test_a_stop_token_ends_and_is_part_of_the_output() -> None:
    run = engine()
    free = run.add("free", prompt(5), max_tokens=20)
    run.run()
    tokens = expected_tokens(free, 0)
    stop = tokens[7]
    message = AddRequest(
        request_id="s",
        token_ids=prompt(5),
        params=msgspec.structs.replace(free.params, stop_token_ids=(stop,)),
        arrival_s=0.0,
    )
    assert run.scheduler.add(message) is None
    run.run()
    last = run.outputs["s", 0][-1]
    assert run.tokens("s") == tokens[: tokens.index(stop) + 1]
    assert (last.finish_reason, last.stop_token_id) == ("stop", stop)


def test_a_stop_token_among_the_first_min_tokens_does_not_end() -> None:
    run = engine()
    run.add("a", prompt(5), max_tokens=6, stop_token_ids=tuple(range(50)), min_tokens=3)
    run.run()
    assert len(run.tokens("a")) == 4
    assert run.outputs["a", 0][-1].finish_reason == "stop"


def test_an_abort_frees_everything_whatever_the_sequence_was_doing() -> None:
    run = engine(max_num_seqs=1, max_num_batched_tokens=8)
    run.add("prefilling", prompt(20), n=2)
    run.add("queued", prompt(20))
    run.step()
    run.scheduler.abort("prefilling")
    run.scheduler.abort("queued")
    run.scheduler.abort("unknown")
    run.run()
    assert run.outputs == {}
    run.assert_nothing_left()


def test_a_step_that_fails_ends_its_own_sequences_only() -> None:
    run = engine(max_num_seqs=1)
    run.add("guilty", prompt(4), n=2)
    run.add("innocent", prompt(4, start=50))
    plan = one(run.scheduler.schedule())
    outputs = run.scheduler.fail(plan, "it broke")
    assert [(o.request_id, o.index, o.finish_reason, o.error) for o in outputs] == [
        ("guilty", 0, "error", "it broke"),
        ("guilty", 1, "error", "it broke"),
    ]
    run.run()
    run.assert_tokens_as_if_alone("innocent")
    run.assert_nothing_left()


def test_what_a_failed_step_computed_is_not_shared() -> None:
    run = engine()
    run.add("guilty", prompt(20))
    run.scheduler.fail(one(run.scheduler.schedule()), "it broke")
    run.add("same", prompt(20), max_tokens=2)
    run.run()
    assert run.outputs["same", 0][0].num_cached_tokens == 0
    run.assert_tokens_as_if_alone("same")


def test_a_plan_executed_in_halves_is_updated_in_halves() -> None:
    run = engine()
    run.add("a", prompt(4), max_tokens=1)
    run.add("b", prompt(4, start=50), max_tokens=1)
    plan = one(run.scheduler.schedule())
    halves = [Plan(plan.step, (), (new,), (), (step,)) for new, step in zip(plan.new, plan.steps, strict=True)]
    [good] = run.scheduler.update(halves[0], run.oracle.execute(halves[0]))
    [bad] = run.scheduler.fail(halves[1], "it broke")
    assert (good.request_id, good.finish_reason) == ("a", "length")
    assert (bad.request_id, bad.finish_reason) == ("b", "error")
    run.run()
    run.assert_nothing_left()


# steps in flight


def test_the_next_step_can_be_planned_before_the_result_of_this_one() -> None:
    run = engine(depth=2)
    run.add("a", prompt(6), max_tokens=5)
    run.run()
    steps = [step for plan in run.plans for step in plan.steps]
    assert [step.start for step in steps] == [0, 6, 7, 8, 9], "not one step too many: max_tokens is known beforehand"
    run.assert_tokens_as_if_alone("a")
    run.assert_nothing_left()


def test_tokens_of_a_sequence_that_ended_with_a_step_in_flight_are_ignored() -> None:
    run = engine()
    run.add("a", prompt(6), max_tokens=5)
    first = one(run.scheduler.schedule())
    second = one(run.scheduler.schedule())
    assert [step.start for step in second.steps] == [6]
    results = [run.oracle.execute(first), run.oracle.execute(second)]
    assert len(run.scheduler.update(first, results[0])) == 1
    run.scheduler.abort("a")
    assert run.scheduler.update(second, results[1]) == []
    run.run()
    run.assert_nothing_left()


def test_a_result_without_the_token_asked_for_is_an_error_that_says_so() -> None:
    run = engine()
    run.add("a", prompt(6))
    plan = one(run.scheduler.schedule())
    with pytest.raises(RuntimeError, match="gave no token for sequence"):
        run.scheduler.update(plan, StepResult(plan.step, 0.01, ()))


def test_results_for_unknown_sequences_are_ignored() -> None:
    run = engine()
    plan = Plan(0, (), (), (), (SequenceStep(77, 0, 1, ((0,),), True),))
    assert run.scheduler.update(plan, StepResult(0, 0.01, (Sampled(77, (1,)),))) == []


def test_the_books_are_checked() -> None:
    run = engine()
    run.add("a", prompt(6))
    run.step()
    run.scheduler.kv_cache.pool.share([0])
    with pytest.raises(AssertionError, match="block 0"):
        run.scheduler.check_integrity()


def test_all_answers_of_a_request_count_in_the_queue_until_each_is_started_or_given_up() -> None:
    run = engine(max_num_seqs=2, max_num_queued_reqs=3)
    run.add("large", prompt(4), max_tokens=8, n=4)
    refused = run.scheduler.add(message(4, name="two more", n=2))
    assert refused is not None
    assert "4 requests are waiting, this request asks for 2 answers, and the queue holds 3" in refused.message
    run.add("one more", prompt(4), max_tokens=8)
    assert run.scheduler.add(message(4, name="no more")) is not None
    run.scheduler.abort("large", 3)
    run.scheduler.check_integrity()
    run.add("in its place", prompt(4), max_tokens=8)
    assert run.scheduler.add(message(4, name="no more")) is not None
    run.scheduler.abort("large")
    run.scheduler.check_integrity()
    assert run.scheduler.add(message(4, name="three", n=3)) is None
    assert run.scheduler.add(message(4, name="no more")) is not None


def test_whoever_bounds_how_much_waits_is_not_asked_by_the_queue() -> None:
    run = engine(max_num_seqs=1, max_num_queued_reqs=1, max_num_queued_tokens=10)
    for number in range(9):
        assert run.scheduler.add(message(8, name=f"r{number}", is_let_in=True)) is None
    assert run.scheduler.add(message(1, name="asks")) is not None


def test_the_first_of_several_prompts_asks_for_the_tokens_of_all() -> None:
    run = engine(max_num_seqs=1, max_num_queued_tokens=100)
    run.add("running", prompt(30), max_tokens=8)
    run.step()
    refused = run.scheduler.add(message(4, name="first", queued_tokens=101))
    assert refused is not None
    assert "this one has 101" in refused.message
    assert run.scheduler.add(message(4, name="first", queued_tokens=100)) is None
