"""Scheduling where layers have windows: what is given up, found again, and waited for."""

from __future__ import annotations

from headrace.engine.scheduler import Scheduler, SchedulerSettings
from headrace.protocol.ipc import AddRequest, SamplingParams
from tests.paged_oracle import Engine


def engine(*windows: int | None, num_blocks: int, chunk: int = 8, block_size: int = 4, **changes: object) -> Engine:
    settings = SchedulerSettings(
        max_num_seqs=8, max_num_batched_tokens=chunk, max_model_len=1000, num_blocks=num_blocks,
        block_size=block_size, windows=windows, **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    return Engine(Scheduler(settings, now=lambda: 5.0))


def prompt(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_a_request_far_longer_than_the_cache_of_a_window_is_served() -> None:
    run = engine(8, num_blocks=6)
    run.add("a", prompt(200), max_tokens=30)
    run.run()
    run.assert_tokens_as_if_alone("a")
    run.assert_nothing_left()


def test_what_can_never_fit_is_refused_with_the_length_that_would() -> None:
    """A window of 8 and steps of 8 touch 5 blocks at most, which leaves 7 blocks of 12 to the layers without one."""
    run = engine(None, 8, num_blocks=12)
    params = SamplingParams(max_tokens=1)
    refused = run.scheduler.add(AddRequest(request_id="r", token_ids=prompt(29), params=params, arrival_s=0.0))
    assert refused is not None
    assert refused.code == "kv_cache_too_small"
    assert "the whole cache holds 28" in refused.message
    run.add("a", prompt(28), max_tokens=1)
    run.run()
    run.assert_tokens_as_if_alone("a")


def test_a_conversation_goes_on_from_its_last_window() -> None:
    """The second turn finds the first, though of the layers with a window only the end is left."""
    run = engine(None, 8, num_blocks=40)
    run.add("first", prompt(60), max_tokens=9)
    run.run()
    history = prompt(60) + run.tokens("first")
    run.add("second", [*history, 7, 7, 7], max_tokens=3)
    run.run()
    assert run.outputs["second", 0][0].num_cached_tokens == 68
    run.assert_tokens_as_if_alone("second")


def test_windows_that_move_on_from_blocks_they_share_may_have_to_wait_and_then_the_last_makes_room() -> None:
    """While both see the same blocks of their windows, two requests fit a cache that is too small for them apart."""
    run = engine(20, num_blocks=28, chunk=2, block_size=1)
    run.add("a", prompt(100), max_tokens=3)
    while run.scheduler.stats(0.0).step < 15:
        run.step()
    run.add("b", prompt(30) + prompt(30, start=500), max_tokens=3)
    run.run()
    assert run.outputs["b", 0][0].num_cached_tokens >= 28
    assert sum(run.outputs[name, 0][-1].num_preemptions for name in "ab") == 1
    for name in "ab":
        run.assert_tokens_as_if_alone(name)
    run.assert_nothing_left()


def test_forks_behind_a_window_share_what_is_left_of_the_prompt() -> None:
    run = engine(None, 8, num_blocks=60, chunk=64, enable_prefix_caching=False)
    run.add("a", prompt(41), max_tokens=20, n=3)
    run.step()
    plan = run.step()
    assert plan is not None
    assert [(step.start, step.num_tokens) for step in plan.steps] == [(41, 1), (40, 1), (40, 1)]
    run.run()
    run.assert_tokens_as_if_alone("a")
    run.assert_nothing_left()
