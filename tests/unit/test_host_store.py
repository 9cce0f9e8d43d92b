"""Blocks in host memory: moved out and back they are the same prefix, and a move that fails costs time only."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")

from headrace.config.model_files import open_model  # noqa: E402
from headrace.core import parts  # noqa: E402
from headrace.engine.plan import NewSequence, Plan, SequenceStep  # noqa: E402
from headrace.kernels.reference import ReferenceKernels  # noqa: E402
from headrace.protocol.ipc import SamplingParams  # noqa: E402
from headrace.runtime import host_store  # noqa: E402
from headrace.runtime.runner import Runner  # noqa: E402
from tests.tiny_models import tiny_llama  # noqa: E402

PROMPT = tuple(range(10, 21))
"""Eleven tokens: two blocks of four and three in another."""
FIRST = Plan(
    0, (), (NewSequence(1, PROMPT, 11, 0, SamplingParams(max_tokens=9, temperature=0.0)),), (),
    (SequenceStep(1, 0, 11, ((5, 6, 7),), True),),
)  # fmt: skip
OTHER = Plan(
    1, (1,), (NewSequence(2, PROMPT[::-1], 11, 0, FIRST.new[0].params),), (),
    (SequenceStep(2, 0, 11, ((5, 6, 7),), True),), saves=((5, 0), (6, 1)),
)  # fmt: skip
"""What the first sequence had computed is saved, and its blocks are given to another."""
AGAIN = Plan(
    2, (2,), (replace(FIRST.new[0], seq_id=3),), (),
    (SequenceStep(3, 8, 3, ((9, 2, 7),), True, loads=((0, 9), (1, 2))),),
)  # fmt: skip


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[1, 32])
def runner(model_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Moving blocks one by one, as on a CPU, and many at once, as on a GPU."""
    monkeypatch.setitem(host_store.BLOCKS_PER_MOVE, "cpu", request.param)
    runner = Runner(open_model(model_path), ReferenceKernels())
    runner.load()
    runner.allocate_kv_cache(12, 4)
    return runner


def test_a_prefix_that_was_moved_out_and_back_gives_the_same_token(runner: Runner) -> None:
    first = runner.execute(FIRST)
    other = runner.execute(OTHER)
    again = runner.execute(AGAIN)
    assert again.sampled[0].token_ids == first.sampled[0].token_ids
    assert again.lost == other.lost == ()
    assert other.saved_s > 0
    assert again.loaded_s > 0


def test_a_slot_may_be_saved_and_loaded_in_one_plan(runner: Runner) -> None:
    first = runner.execute(FIRST)
    both = replace(AGAIN, dropped=(1,), saves=OTHER.saves)
    assert runner.execute(both).sampled[0].token_ids == first.sampled[0].token_ids


@pytest.mark.parametrize("broken", ["read_blocks", "write_blocks"])
def test_a_move_that_fails_leaves_the_others_alone(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no memory for it")

    beside = runner.execute(FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(runner.kernels, broken, fails)
        runner.execute(OTHER)
        step = SequenceStep(4, 0, 11, ((0, 1, 3),), True)
        result = runner.execute(
            replace(AGAIN, new=(*AGAIN.new, replace(FIRST.new[0], seq_id=4)), steps=(*AGAIN.steps, step))
        )
    assert result.lost == (3,)
    assert [(s.seq_id, s.token_ids) for s in result.sampled] == [(4, beside.sampled[0].token_ids)]
    assert runner.num_sequences == 1, "what was lost is forgotten and can come again"
    anew = replace(FIRST, dropped=(4,), new=AGAIN.new, steps=(SequenceStep(3, 0, 11, ((9, 2, 7),), True),))
    assert runner.execute(anew).sampled[0].token_ids == beside.sampled[0].token_ids


def test_a_copy_of_a_block_that_did_not_come_is_lost_too(runner: Runner) -> None:
    fork = SequenceStep(4, 6, 5, ((3, 8, 0),), True)
    plan = replace(
        AGAIN, new=(*AGAIN.new, replace(FIRST.new[0], seq_id=4)), steps=(*AGAIN.steps, fork), block_copies=((2, 8),)
    )
    assert set(runner.execute(plan).lost) == {3, 4}, "nothing was saved"


def test_a_step_done_again_in_parts_saves_nothing_again(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it fails its blocks may have been written to: saved a second time, they would be somebody else's."""
    first = runner.execute(FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(runner.kernels, "sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.execute(OTHER)
    step = SequenceStep(4, 0, 11, ((0, 1, 3),), True)
    two = replace(OTHER, dropped=(), new=(*OTHER.new, replace(FIRST.new[0], seq_id=4)), steps=(*OTHER.steps, step))
    for part in parts(two, frozenset()):
        assert part.saves == ()
        runner.execute(part)
    again = replace(AGAIN, dropped=(2, 4))
    assert runner.execute(again).sampled[0].token_ids == first.sampled[0].token_ids


def test_blocks_may_be_fetched_in_the_middle_of_a_prompt(runner: Runner) -> None:
    """The second block in a later step than the first, over a token of it that was computed between."""
    first = runner.execute(FIRST)
    runner.execute(OTHER)
    runner.execute(replace(AGAIN, steps=(SequenceStep(3, 4, 1, ((9, 2, 7),), False, loads=((0, 9),)),)))
    rest = replace(AGAIN, dropped=(), new=(), steps=(SequenceStep(3, 8, 3, ((),), True, loads=((1, 2),)),))
    assert runner.execute(rest).sampled[0].token_ids == first.sampled[0].token_ids
    runner.kernels.write_blocks = lambda *_: 1 / 0  # type: ignore[method-assign]
    assert runner.execute(rest).lost == (3,)


def test_a_cache_that_is_released_takes_the_host_memory_with_it(runner: Runner) -> None:
    runner.execute(FIRST)
    runner.execute(OTHER)
    runner.release_kv_cache()
    runner.allocate_kv_cache(12, 4)
    assert runner.execute(AGAIN).lost == (3,)
