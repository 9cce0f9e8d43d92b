"""The host tier: what is kept in it, what is fetched, and when computing again is better."""

from __future__ import annotations

import pytest

from headrace.engine.block_hash import block_key, domain_digest
from headrace.engine.scheduler import Scheduler, SchedulerSettings
from headrace.engine.tiers import TRIED_ANYWAY, HostTier, MoveTimes
from tests.paged_oracle import Engine

KEYS = [block_key(domain_digest([]), [i]) for i in range(9)]


def engine(**changes: object) -> Engine:
    """A cache of 12 blocks of 4 tokens and a host tier of 40."""
    fields: dict[str, object] = {
        "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 200, "num_blocks": 12, "block_size": 4,
        "num_host_blocks": 40,
    }  # fmt: skip
    scheduler = Scheduler(SchedulerSettings(**fields | changes), now=lambda: 5.0)  # type: ignore[arg-type]
    return Engine(scheduler, step_s=lambda plan: 0.001 + 0.0003 * plan.num_tokens)


def prompt(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def serve(run: Engine, name: str, token_ids: list[int], max_tokens: int = 1) -> int:
    """The tokens of a prompt that were found somewhere."""
    run.add(name, token_ids, max_tokens=max_tokens)
    run.run()
    run.assert_tokens_as_if_alone(name)
    return run.outputs[name, 0][0].num_cached_tokens


def test_the_content_least_recently_stored_or_used_makes_room() -> None:
    tier = HostTier(3)
    slots = [tier.store(0, key) for key in KEYS[:3]]
    assert tier.store(0, KEYS[0]) is None, "it is there already"
    assert tier.store(0, KEYS[3]) == slots[1]
    assert [tier.find(0, key) for key in KEYS[:4]] == [slots[0], None, slots[2], slots[1]]
    assert tier.find(1, KEYS[0]) is None, "another group's block with the same tokens"
    tier.check_integrity()


def test_a_slot_that_a_plan_reads_gets_no_other_content() -> None:
    tier = HostTier(2)
    first, second = (tier.store(0, key) for key in KEYS[:2])
    assert first is not None
    assert second is not None
    tier.hold([first])
    assert tier.store(0, KEYS[2]) == second
    tier.hold([second])
    assert tier.store(0, KEYS[3]) is None
    tier.release()
    assert tier.store(0, KEYS[3]) == first
    tier.check_integrity()


def test_what_is_discarded_leaves_room_and_clearing_counts() -> None:
    tier = HostTier(2)
    slot = tier.store(0, KEYS[0])
    assert slot is not None
    tier.discard(slot)
    tier.discard(slot)
    assert (tier.num_used, tier.find(0, KEYS[0])) == (0, None)
    tier.store(0, KEYS[1])
    tier.store(1, KEYS[1])
    assert (tier.clear(), tier.num_used) == (2, 0)
    tier.check_integrity()


def test_a_prefix_that_was_evicted_is_fetched_and_not_computed() -> None:
    run = engine()
    assert serve(run, "a", prompt(33)) == 0
    assert serve(run, "b", prompt(33, 100)) == 0
    assert serve(run, "again", prompt(33)) == 32
    loads = [len(plan.loads) for plan in run.plans if plan.loads]
    assert loads == [8 - 12 + 8 + 1], "what was still in the cache is not fetched"
    stats = run.scheduler.stats(0.0)
    assert (stats.prefix_hits_total, stats.host_hits_total) == (32 - 4 * loads[0], 4 * loads[0])
    assert stats.host_loaded_total == loads[0]


def test_a_content_is_saved_once_however_often_it_is_evicted() -> None:
    run = engine()
    for turn in range(4):
        serve(run, f"a{turn}", prompt(33))
        serve(run, f"b{turn}", prompt(33, 100))
    assert run.scheduler.stats(0.0).host_saved_total <= 16


@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_request_gets_its_blocks_back(caching: bool) -> None:
    """Also without prefix caching, where nobody else may have them."""
    run = engine(enable_prefix_caching=caching)
    for name, start in (("a", 0), ("b", 100), ("c", 200)):
        run.add(name, prompt(11, start), max_tokens=30)
    swapped = 0
    while run.scheduler.has_work:
        run.step()
        swapped = max(swapped, run.scheduler.stats(0.0).num_swapped)
    for name in "abc":
        run.assert_tokens_as_if_alone(name)
    stats = run.scheduler.stats(0.0)
    assert stats.preemptions_total > 0
    assert stats.host_loaded_total > 0
    assert swapped > 0
    computed = sum(plan.num_tokens for plan in run.plans)
    assert computed < 3 * 41 + 4 * stats.preemptions_total + 4, "but for a part of a block nothing is computed twice"
    if not caching:
        assert stats.host_blocks_used == 0, "nobody will ask for a finished request's blocks"
        assert serve(run, "again", prompt(11)) == 0


def test_what_costs_more_to_move_than_to_compute_is_computed() -> None:
    def fetched(move_s: float) -> int:
        run = engine()
        run.oracle.move_s = move_s
        for turn in range(6):
            for i in range(3):
                serve(run, f"{turn} {i}", prompt(33, 100 * i))
        return run.scheduler.stats(0.0).host_loaded_total

    # A token takes 0.3 ms, a block of four 1.2.
    assert fetched(1e-5) > 60
    assert fetched(1e-1) < 20


def test_fetching_takes_the_part_that_is_worth_it() -> None:
    """Half of the prefix is in the cache, half in the tier, and fetching is slow: the half in the cache is used."""
    run = engine()
    serve(run, "a", prompt(33))
    serve(run, "b", prompt(21, 100))
    moves = run.scheduler.kv_cache.moves
    moves.loaded(1, 100.0)
    assert 0 < serve(run, "again", prompt(33)) < 32
    assert not any(plan.loads for plan in run.plans)


def test_a_rate_that_was_measured_too_low_is_measured_again() -> None:
    times = MoveTimes()
    times.saved(10, 5.0)
    times.loaded(0, 0.0)
    assert (times.both_s, times.load_s) == (0.5, 0.0)
    assert [times.tried_anyway() for _ in range(2 * TRIED_ANYWAY)].count(True) == 2
    for _ in range(30):
        times.saved(10, 0.01)
    assert times.both_s < 0.002
    times.saved(1, 100.0)
    assert times.both_s < 0.004, "one hiccup"


def test_resetting_the_prefix_cache_empties_the_tier_too() -> None:
    run = engine()
    serve(run, "a", prompt(33))
    serve(run, "b", prompt(33, 100))
    stats = run.scheduler.stats(0.0)
    assert stats.host_blocks_used > 0
    cached = run.scheduler.kv_cache.pool.num_cached
    assert run.scheduler.reset_prefix_cache() == cached + stats.host_blocks_used
    assert serve(run, "again", prompt(33)) == 0
    assert run.scheduler.stats(0.0).host_blocks_used == 0 or run.scheduler.stats(0.0).host_loaded_total == 0


def test_a_load_that_fails_is_computed_and_not_tried_again() -> None:
    run = engine()
    serve(run, "a", prompt(33))
    serve(run, "b", prompt(33, 100))
    run.oracle.fails = lambda move: move == "load"
    serve(run, "again", prompt(33))
    assert sum(bool(plan.loads) for plan in run.plans) == 1


def test_a_fork_of_a_sibling_whose_blocks_do_not_come_is_computed_too() -> None:
    """The sibling was preempted, and is fetched in the very step in which another fork copies from it."""
    for fails in (False, True):
        run = engine(num_blocks=14, max_num_seqs=4)
        run.oracle.fails = lambda move, f=fails: f and move == "load"
        run.add("n", prompt(14), max_tokens=24, n=3)
        run.add("b", prompt(9, 100), max_tokens=24)
        run.run()
        run.assert_tokens_as_if_alone("n")
        run.assert_tokens_as_if_alone("b")
        assert any(plan.loads for plan in run.plans)


@pytest.mark.parametrize(("windows", "pieces"), [((None,), 3), ((None, 24), 3), ((24,), 1)])
def test_while_answers_stream_a_long_prefix_is_fetched_a_piece_a_step(
    windows: tuple[int | None, ...], pieces: int
) -> None:
    """Fetching all of it at once would stall them as computing it would. One token a step is computed in between. Of
    layers with a window only the end is fetched."""
    run = engine(
        windows=windows, num_blocks=70 * len(windows), num_host_blocks=400, max_num_batched_tokens=32,
        step_time_target_s=0.02, max_model_len=400,
    )  # fmt: skip
    run.step_s = lambda plan: 0.001 + 0.01 * plan.num_tokens
    run.oracle.move_s = 0.004  # five blocks a step
    serve(run, "a", prompt(200))
    assert serve(run, "b", prompt(230, 1000)) == 0
    assert serve(run, "c", prompt(230, 2000)) == 0
    run.add("streams", prompt(9, 3000), max_tokens=60)
    for _ in range(3):
        run.step()
    first = len(run.plans)
    assert serve(run, "again", prompt(200), max_tokens=2) > 0
    mine = [plan for plan in run.plans[first:] if plan.loads]
    assert len(mine) >= pieces
    assert max((len(plan.loads) for plan in mine[1:]), default=0) <= max(5, len(windows) * 8)
    computed = sum(step.num_tokens for plan in run.plans[first:] for step in plan.steps) - 60
    assert computed < 60, "most of it was fetched"
    run.assert_tokens_as_if_alone("streams")
    run.assert_nothing_left()
